#!/usr/bin/env bash
# Believed: a model's own load_adapter (and so from_pretrained of an adapter's folder) computes what PeftModel.from_pretrained computes.
# So is: for DoRA transformers looks for `lora_magnitude_vector.default.weight` where the file's name becomes `lora_magnitude_vector.default`.
# The trained magnitudes are "unexpected", new ones are made from the base, and the model answers: no error, only a table of
# names on the screen, whose note says that unexpected ones can be ignored. Plain LoRA is right. Load DoRA with PEFT.
# Seen: transformers 5.23.0, peft 0.21.2, torch 2.13.0, 2026-11-28; largest difference of logits between the two loaders:
#   plain: 0 of an effect of 0.712; unexpected 0. DoRA: 0.169 of an effect of 0.585; unexpected 4
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/loaders.py" <<'PY'
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def saved(name, **options):
    """Saves a random adapter; its logits by PEFT, loaded again."""
    model = base()
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(model, config)
    torch.manual_seed(3)
    for parameter in (value for key, value in adapted.named_parameters() if "lora_A" in key or "lora_B" in key):
        parameter.data.normal_(0, 0.2)
    for parameter in (value for key, value in adapted.named_parameters() if "magnitude" in key):
        parameter.data.mul_(1.5)
    adapted.save_pretrained(place / name)
    return logits(PeftModel.from_pretrained(base(), place / name).eval())


without, seen = logits(base()), {}
for name, options in (("plain", {}), ("DoRA", {"use_dora": True})):
    right = saved(name, **options)
    model = base()
    told = model.load_adapter(place / name)
    off = float((logits(model.eval()) - right).abs().max())
    seen[name] = off > 0.01, bool(told.unexpected_keys)
    print(f"{name}: {off:.3g} of an effect of {float((right - without).abs().max()):.3g}; unexpected {len(told.unexpected_keys)}")
sys.exit(0 if seen == {"plain": (False, False), "DoRA": (True, True)} else "changed")
PY
"$place/venv/bin/python" "$place/loaders.py" "$place" 2>/dev/null
