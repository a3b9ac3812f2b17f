#!/usr/bin/env bash
# Believed: mlx-lm reads a checkpoint that transformers 5 has saved, or refuses it.
# So is: transformers 5 writes the rope's base in rope_parameters; several of mlx-lm's models know rope_theta alone. Those with a default of
# their own take that without a word (Qwen2, SmolLM3, Cohere 2), others fail (Granite). With rope_theta beside it in config.json all agree.
# A merged or fully tuned base is such a checkpoint: an adapter that mlx-lm trains on it is trained for another model.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.23.0, torch 2.13.0, 2026-11-29; difference of logits, of the largest, float32:
#   Qwen2, SmolLM3, Cohere2 as saved: above 0.05; Granite: TypeError; with rope_theta: all below 1e-4
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 safetensors==0.8.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2 2>/dev/null
cat >"$place/rope.py" <<'PY'
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

PLACE = Path(sys.argv[1])
IDS = [5 + number * 7 % 200 for number in range(40)]
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512}

FAMILIES = {"Qwen2": {}, "SmolLM3": {}, "Cohere2": {"head_dim": 16}, "Granite": {}}


def difference(name, **added):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 12345.0}
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name], rope_parameters=rope, initializer_range=0.3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    folder = PLACE / f"{name}-{len(added)}"
    model.save_pretrained(folder)
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(kept | added))
    with torch.no_grad():
        right = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    try:
        found, _ = load_model(folder, strict=True)
    except TypeError as error:
        return str(error)
    return float(np.abs(np.array(found(mx.array([IDS])))[0] - right).max() / np.abs(right).max())


saved = {name: difference(name) for name in FAMILIES}
mended = {name: difference(name, rope_theta=12345.0) for name in FAMILIES}
for name in FAMILIES:
    print(f"{name}: as saved {saved[name]}, with rope_theta {mended[name]}")
wrong = all(isinstance(saved[name], float) and saved[name] > 0.05 for name in ("Qwen2", "SmolLM3", "Cohere2"))
failed = "rope_theta" in str(saved["Granite"])
sys.exit(not (wrong and failed and all(isinstance(each, float) and each < 1e-4 for each in mended.values())))
PY
"$place/venv/bin/python" "$place/rope.py" "$place" 2>/dev/null
