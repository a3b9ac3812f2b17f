#!/usr/bin/env bash
# Believed: torchtune's adapter in PEFT's form (tune_to_peft_adapter_weights) computes what torchtune's own form does, DoRA included.
# So is: it moves the rows of lora_B of q_proj and k_proj from the order of Llama's own code, where the two rows that a rotary embedding
# turns are neighbours, into that of transformers, and leaves DoRA's magnitudes in the first order: each scales another row. v_proj
# is right. (adapter_config.json has no use_dora either, so that PEFT ignores the magnitudes until somebody adds it.)
# Seen: torchtune 0.6.1, torchao 0.10.0, torch 2.13.0, 2026-11-28; rows and magnitudes numbered alike before, 2 heads of 8:
#   q_proj: rows 0 2 4 6 1 3 5 7 8 10 …, magnitudes 0 1 2 3 4 5 6 7 8 9 …; v_proj: both 0 1 2 3 …
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torchtune==0.6.1 torchao==0.10.0 2>/dev/null
cat >"$place/convert.py" <<'PY'
import sys

import torch
from torchtune.models.convert_weights import tune_to_peft_adapter_weights

ROWS = torch.arange(16.0)
own = {}
for name in ("q_proj", "k_proj", "v_proj"):
    own[f"layers.0.attn.{name}.lora_a.weight"] = torch.ones(1, 16)
    own[f"layers.0.attn.{name}.lora_b.weight"] = ROWS[:, None].clone()
    own[f"layers.0.attn.{name}.magnitude"] = ROWS.clone()
made = tune_to_peft_adapter_weights(own, num_heads=2, num_kv_heads=2, dim=16)
differ = []
for name in ("q_proj", "k_proj", "v_proj"):
    key = f"base_model.model.model.layers.0.self_attn.{name}"
    rows, magnitudes = (made[f"{key}.{part}"].flatten().int().tolist() for part in ("lora_B.weight", "lora_magnitude_vector"))
    print(f"{name}: rows {rows}, magnitudes {magnitudes}")
    differ.append(rows != magnitudes)
sys.exit(0 if differ == [True, True, False] else "changed")
PY
"$place/venv/bin/python" "$place/convert.py" 2>/dev/null
