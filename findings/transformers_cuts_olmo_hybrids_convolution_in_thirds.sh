#!/usr/bin/env bash
# Believed: what transformers loads of OLMo Hybrid and saves again has the tensors that it loaded: q_conv1d, k_conv1d and v_conv1d are
# the convolutions of queries, of keys and of values.
# So is: the three are joined at a load, and the join is reversed at a save by cutting all channels in thirds. Queries and keys have
# fewer channels than values (by default 2880, 2880 and 5760), so the q_conv1d that is saved holds those of queries and a part of
# the keys', and v_conv1d the last third of all. transformers joins them again and answers alike; a reader that gives each part its own
# convolution finds other shapes, or, where it does not compare them, other channels. Norms move too: a post_attention_layernorm that
# was loaded by that name, of an attention layer, is saved as feedforward_layer_norm.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29:
#   loaded  q_conv1d 64, k_conv1d 64, v_conv1d 128
#   saved   q_conv1d 86, k_conv1d 86, v_conv1d 84
#   loaded  model.layers.1.post_attention_layernorm.weight
#   saved   model.layers.1.feedforward_layer_norm.weight
#   both files load without missing weights, and the logits are equal
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 safetensors==0.8.0 2>/dev/null
cat >"$place/thirds.py" <<'PY'
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

place = Path(sys.argv[1])
config = AutoConfig.for_model(
    "olmo_hybrid", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
    linear_key_head_dim=32, linear_value_head_dim=64, pad_token_id=0, eos_token_id=1)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config).save_pretrained(place / "first")
tensors = load_file(place / "first/model.safetensors")
# The parts as the joined convolution has them, and the norm by the module's name.
own = "model.layers.0.linear_attn."
whole = torch.cat([tensors[f"{own}{part}_conv1d.weight"] for part in "qkv"])
for part, rows in zip("qkv", whole.split([64, 64, 128])):
    tensors[f"{own}{part}_conv1d.weight"] = rows.clone()
before, after = "model.layers.1.post_attention_layernorm.weight", "model.layers.1.feedforward_layer_norm.weight"
if after in tensors:
    tensors[before] = tensors.pop(after)
shutil.copytree(place / "first", place / "loaded")
save_file(tensors, place / "loaded/model.safetensors", metadata={"format": "pt"})
logits = {}
for source, target in (("loaded", "again"), ("again", "last")):
    model, info = AutoModelForCausalLM.from_pretrained(place / source, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        sys.exit(f"changed: {source} lacks {sorted(info['missing_keys'])[:3]}")
    logits[source] = model.eval()(input_ids=torch.arange(3, 12)[None]).logits
    model.save_pretrained(place / target)
saved = load_file(place / "again/model.safetensors")
sizes = {}
for told, found in (("loaded", tensors), ("saved ", saved)):
    sizes[told] = [found[f"{own}{part}_conv1d.weight"].shape[0] for part in "qkv"]
    print(told, " q_conv1d {}, k_conv1d {}, v_conv1d {}".format(*sizes[told]))
print("loaded ", before)
print("saved  ", after if after in saved else before)
same = torch.equal(logits["loaded"], logits["again"])
print("both files load without missing weights, and the logits are", "equal" if same else "different")
seen = sizes["loaded"] == [64, 64, 128] and sizes["saved "] == [86, 86, 84] and after in saved and same
sys.exit(0 if seen else "changed")
PY
"$place/venv/bin/python" "$place/thirds.py" "$place" 2>/dev/null
