#!/usr/bin/env bash
# Believed: a model's own load_adapter takes an activated LoRA as PeftModel.from_pretrained does, or refuses it.
# So is: only PeftModel's forward looks for the invocation tokens. Loaded by transformers, the adapter's tensors are all found, nothing is
# warned of, and the model answers as the base, behind the invocation too. Load activated LoRA with PEFT.
# Seen: transformers 5.23.0, peft 0.21.2, torch 2.13.0, 2026-11-28; the invocation is token 5, last at position 7 of ten:
#   by PEFT, to the base: 0 before position 7, then 0.52 to 0.6; by load_adapter, to the base: 0 everywhere; missing 0, unexpected 0
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


without = logits(base())
right = (saved("activated", alora_invocation_tokens=[5]) - without).abs().amax(-1)
model = base()
told = model.load_adapter(place / "activated")
got = (logits(model.eval()) - without).abs().amax(-1)
print("by PEFT, to the base:", [round(float(x), 2) for x in right])
print("by load_adapter, to the base:", [round(float(x), 2) for x in got])
print("missing", len(told.missing_keys), "unexpected", len(told.unexpected_keys))
silent = not told.missing_keys and not told.unexpected_keys
sys.exit(0 if silent and right[:7].max() == 0 and right[7:].min() > 0.01 and got.max() == 0 else "changed")
PY
"$place/venv/bin/python" "$place/loaders.py" "$place" 2>/dev/null
