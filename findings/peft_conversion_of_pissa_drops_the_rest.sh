#!/usr/bin/env bash
# Believed: PEFT's conversion of a trained PiSSA adapter (save_pretrained with path_initial_model_for_weight_conversion) makes a plain LoRA of it.
# So is: the converted file holds the pairs lora_A and lora_B of linears and nothing else. DoRA's magnitudes, trained tokens, LoRA on an
# embedding and whole modules (modules_to_save) are left out without an error or a warning, while the config still names them, so
# that the file loads with those parts as they were before the training.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; tensors that the saved adapter has and the converted one lacks:
#   use_dora: 2 lora_magnitude_vector; trainable_token_indices: 1 trainable_tokens_delta; embed_tokens: 2 lora_embedding; modules_to_save: 1 lm_head
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/convert.py" <<'PY'
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES = {
    "nothing beside": ({}, 0),
    "use_dora": ({"use_dora": True}, 2),
    "trainable_token_indices": ({"trainable_token_indices": [1, 2]}, 1),
    "embed_tokens": ({"target_modules": ["q_proj", "embed_tokens"]}, 2),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, 1),
}
same = True
for number, (name, (options, expected)) in enumerate(CASES.items()):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))
    options = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "pissa", "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(base, LoraConfig(**options))
    initial, trained, converted = (str(place / f"{kind}{number}") for kind in ("initial", "trained", "converted"))
    model.save_pretrained(initial, save_embedding_layers=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(trained, save_embedding_layers=False)
    model.save_pretrained(converted, save_embedding_layers=False, path_initial_model_for_weight_conversion=initial)
    lost = sorted(load_file(f"{trained}/adapter_model.safetensors").keys() - load_file(f"{converted}/adapter_model.safetensors").keys())
    print(f"{name}: {len(lost)} tensors lost", [key.removeprefix("base_model.model.") for key in lost])
    same = same and len(lost) == expected
sys.exit(0 if same else "changed")
PY
"$place/venv/bin/python" "$place/convert.py" "$place" 2>/dev/null
