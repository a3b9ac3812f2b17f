#!/usr/bin/env bash
# Believed: `sym` in a checkpoint's quantization_config tells whether its codes have zeros, for AWQ as for GPTQ.
# So is: in transformers 5 AwqConfig inherits GPTQConfig's settings with their defaults, so that every AWQ config that it writes has
# `sym: true`, `desc_act: false` and `act_group_aware: true`, beside `zero_point: true`, which says the contrary. AutoAWQ's own config has
# no `sym`: a checkpoint gets it when transformers loads and saves it. A reader that takes `sym` takes all zeros for the middle of the
# range, without an error. Read `zero_point` and the stored zeros; for AWQ `sym` says nothing.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-28:
#   read  {'quant_method': 'awq', 'bits': 4, 'group_size': 128, 'zero_point': True, 'version': 'gemm'}
#   saved sym=True zero_point=True act_group_aware=True desc_act=False
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 transformers==5.23.0 2>/dev/null
cat >"$place/awq.py" <<'PY'
import json
import sys

from transformers import AwqConfig, LlamaConfig

given = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
config = LlamaConfig(quantization_config=AwqConfig.from_dict(dict(given)))
config.save_pretrained(sys.argv[1])
saved = json.load(open(f"{sys.argv[1]}/config.json"))["quantization_config"]
print("read ", given)
print("saved", *(f"{name}={saved.get(name)}" for name in ("sym", "zero_point", "act_group_aware", "desc_act")))
sys.exit(0 if (saved.get("sym"), saved.get("zero_point")) == (True, True) else "changed")
PY
"$place/venv/bin/python" "$place/awq.py" "$place/saved" 2>/dev/null
