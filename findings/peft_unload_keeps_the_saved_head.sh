#!/usr/bin/env bash
# Believed: PeftModel.unload gives the base model back, as it was before the adapter.
# So is: of an adapter with modules_to_save the trained copy stays: the model that unload returns has the base's linears and the adapter's
# lm_head. disable_adapter gives the base's answers; LoRA and trained token rows are taken out right. Load the base again instead.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; largest difference of logits to the base:
#   LoRA alone: disabled 0, unloaded 0; modules_to_save lm_head: disabled 0, unloaded 5.17; trained tokens: disabled 0, unloaded 0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/unload.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


without, seen = logits(base()), {}
kinds = {"LoRA alone": {}, "modules_to_save lm_head": {"modules_to_save": ["lm_head"]}, "trained tokens": {"trainable_token_indices": [5, 7]}}
for name, options in kinds.items():
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    model = get_peft_model(base(), config).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.2)
    with model.disable_adapter():
        disabled = float((logits(model) - without).abs().max())
    unloaded = float((logits(model.unload()) - without).abs().max())
    seen[name] = disabled > 1e-5, unloaded > 1e-5
    print(f"{name}: disabled {disabled:.3g}, unloaded {unloaded:.3g}")
sys.exit(0 if list(seen.values()) == [(False, False), (False, True), (False, False)] else "changed")
PY
"$place/venv/bin/python" "$place/unload.py" 2>/dev/null
