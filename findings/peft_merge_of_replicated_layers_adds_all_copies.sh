#!/usr/bin/env bash
# Believed: merge_and_unload gives a model that answers as the adapter did, or refuses a configuration that cannot be merged.
# So is: with layer_replication the copies of a layer share the base's weights and have LoRA matrices of their own. A merge adds each copy's
# delta to the one shared weight, so that every copy computes with the sum of all. No error; the merged model answers otherwise.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; largest difference of logits, merged and not:
#   no replication 2.1e-07 of an effect of 0.71; layers 0 and 1 twice 0.61 of an effect of 0.82
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/merge.py" <<'PY'
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
for name, options in (("no replication", {}), ("layers 0 and 1 twice", {"layer_replication": [[0, 2], [0, 2]]})):
    right = saved(name, **options)
    merged = PeftModel.from_pretrained(base(), place / name).eval().merge_and_unload()
    off = float((logits(merged) - right).abs().max())
    seen[name] = off > 0.01
    print(f"{name}: {off:.2g} of an effect of {float((right - without).abs().max()):.2g}")
sys.exit(0 if list(seen.values()) == [False, True] else "changed")
PY
"$place/venv/bin/python" "$place/merge.py" "$place" 2>/dev/null
