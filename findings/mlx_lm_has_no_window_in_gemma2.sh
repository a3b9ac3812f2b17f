#!/usr/bin/env bash
# Believed: a sliding window in config.json holds in mlx-lm as in transformers, at least for the families that are known for it.
# So is: mlx-lm's Gemma 2, Phi-3 and StarCoder 2 have no window; every layer attends to the whole text. Its Ministral 3 has one where
# layer_types is in the file alone; transformers slides in all layers then. Up to the window both agree, behind it nothing warns:
# adapters that mlx-lm trains on long texts are trained for another model.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.23.0, torch 2.13.0, 2026-11-29; difference of logits, of the largest, float32, of
#   40 tokens: window 8 above 0.05 for all four; window 512 below 1e-3
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 safetensors==0.8.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2 2>/dev/null
cat >"$place/window.py" <<'PY'
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

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 1.0, "original_max_position_embeddings": 512}
SCALED |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
FAMILIES = {
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "rope_parameters": ROPE},
    "Phi3": {"rope_parameters": ROPE},
    "Starcoder2": {"rope_parameters": ROPE, "rope_theta": 10000.0, "tie_word_embeddings": True},
    "Ministral3": {"head_dim": 16, "rope_parameters": SCALED},
}


def difference(name, window):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name], sliding_window=window, initializer_range=0.3)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    folder = PLACE / f"{name}-{window}"
    model.save_pretrained(folder)
    kept = json.loads((folder / "config.json").read_text()) | {"rope_theta": config.rope_parameters["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(kept))
    with torch.no_grad():
        right = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    found, _ = load_model(folder, strict=True)
    return float(np.abs(np.array(found(mx.array([IDS])))[0] - right).max() / np.abs(right).max())


seen = {name: (difference(name, 8), difference(name, 512)) for name in FAMILIES}
for name, (narrow, wide) in seen.items():
    print(f"{name}: window 8 {narrow:.2g}, window 512 {wide:.2g}")
sys.exit(not all(narrow > 0.05 and wide < 1e-3 for narrow, wide in seen.values()))
PY
"$place/venv/bin/python" "$place/window.py" "$place" 2>/dev/null
