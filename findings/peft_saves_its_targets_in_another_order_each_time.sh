#!/usr/bin/env bash
# Believed: PEFT saves the same adapter as the same bytes, so that a digest tells whether an adapter has changed.
# So is: target_modules and exclude_modules are Python sets in LoraConfig and are written in the order of their hashes, which differs in each
# process. adapter_config.json of one adapter, loaded and saved again, differs; the tensors are the same. (json is written with sorted
# keys, which makes the file look canonical.)
# Seen: peft 0.21.2, 2026-11-28; target_modules of one config in files of eight processes: more than one order
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/save.py" <<'PY'
import json
import sys

from peft import LoraConfig

LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]).save_pretrained(sys.argv[1])
print(" ".join(json.load(open(f"{sys.argv[1]}/adapter_config.json"))["target_modules"]))
PY
for seed in 1 2 3 4 5 6 7 8; do
  PYTHONHASHSEED=$seed "$place/venv/bin/python" "$place/save.py" "$place/$seed" 2>/dev/null
done | sort -u | tee "$place/orders"
[ "$(wc -l <"$place/orders")" -gt 1 ] || { echo changed; exit 1; }
