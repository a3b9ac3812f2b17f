#!/usr/bin/env bash
# Believed: an adapter that PEFT saved and loads again answers as it did when it was trained, whatever its alpha_pattern.
# So is: where two keys of alpha_pattern fit one module the first one counts, and save_pretrained sorts the keys. With the general key written
# first, the loaded adapter has another alpha on that module, in silence. With the narrow key first, names like these sort into the same order.
# The same with rank_pattern is an error at load, about shapes. Give each module one key.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-30; alpha of layers.1.self_attn.q_proj trained, loaded, largest difference of logits:
#   {q_proj: 5, layers.1.self_attn.q_proj: 70}: 5.0, 70.0, 0.447; the other way round: 70.0, 70.0, 0.0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/patterns.py" <<'PY'
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])
WIDE, NARROW = {"q_proj": 5}, {"layers.1.self_attn.q_proj": 70}


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def alpha(model):
    linear = model.base_model.model.model.layers[1].self_attn.q_proj
    return linear.scaling["default"] * linear.r["default"]


seen = {}
for name, pattern in {"wide first": WIDE | NARROW, "narrow first": NARROW | WIDE}.items():
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], alpha_pattern=pattern, task_type="CAUSAL_LM")
    trained = get_peft_model(base(), config).eval()
    torch.manual_seed(3)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    with tempfile.TemporaryDirectory() as folder:
        trained.save_pretrained(folder)
        loaded = PeftModel.from_pretrained(base(), folder).eval()
    seen[name] = alpha(trained), alpha(loaded), (logits(trained) - logits(loaded)).abs().max().item()
    print(name, "trained %.1f, loaded %.1f, difference %.3g" % seen[name])
as_seen = seen["wide first"][:2] == (5.0, 70.0) and seen["wide first"][2] > 0.1 and seen["narrow first"] == (70.0, 70.0, 0.0)
sys.exit(not as_seen)
PY
OMP_NUM_THREADS=1 "$place/venv/bin/python" "$place/patterns.py" 2>/dev/null || { echo "changed: PEFT keeps the order of alpha_pattern, or says so"; exit 1; }
