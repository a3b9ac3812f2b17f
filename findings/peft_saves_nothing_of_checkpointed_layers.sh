#!/usr/bin/env bash
# Believed: PEFT's save_pretrained writes the trained matrices, or fails.
# So is: it keeps those entries of the state dict whose names the model's own modules have. PyTorch's wrapper for activation checkpointing
# takes its word (_checkpoint_wrapped_module) out of the names in the state dict and leaves it in those of the modules; the state dict
# of a DataParallel or a compiled model has a word before its names. In both cases nothing is kept: a valid file without any
# tensors is written, with the whole config, and no error and no warning.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; tensors in the saved file:
#   plain 4; layers wrapped for activation checkpointing 0; state_dict of DataParallel 0; state_dict of torch.compile 0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/save.py" <<'PY'
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM

place = Path(sys.argv[1])
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def adapted():
    return get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES)), LoraConfig(target_modules=["q_proj"]))


def count(model, name, **options):
    model.save_pretrained(place / name, **options)
    found = len(load_file(place / name / "adapter_model.safetensors"))
    print(f"{name}: {found} tensors")
    return found


plain, checkpointed = adapted(), adapted()
apply_activation_checkpointing(checkpointed, check_fn=lambda module: "DecoderLayer" in type(module).__name__)
found = [
    count(plain, "plain"),
    count(checkpointed, "activation checkpointing"),
    count(plain, "state_dict of DataParallel", state_dict=torch.nn.DataParallel(plain).state_dict()),
    count(plain, "state_dict of torch.compile", state_dict=torch.compile(plain).state_dict()),
]
sys.exit(0 if found == [4, 0, 0, 0] else "changed")
PY
"$place/venv/bin/python" "$place/save.py" "$place" 2>/dev/null
