#!/usr/bin/env bash
# Believed: mlx-lm computes of a GLM-4 checkpoint (model_type glm) what transformers computes, or refuses it.
# So is: its GLM reads no partial_rotary_factor, at either place, and rotates whole heads; GLM-4 rotates the first half of each. With a factor
# of 1 both agree. It loads strictly and without a word, so an adapter that mlx-lm trains on GLM-4 is trained for another model.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), transformers 5.23.0, torch 2.13.0, 2026-11-29; difference of logits, of the largest, float32:
#   factor 0.5 in rope_parameters: above 0.1; and beside it too: above 0.1; factor 1: below 1e-4
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 safetensors==0.8.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2 2>/dev/null
cat >"$place/glm.py" <<'PY'
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from transformers import GlmConfig, GlmForCausalLM
from mlx_lm.utils import load_model

PLACE = Path(sys.argv[1])
IDS = [5 + number * 7 % 200 for number in range(40)]
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 512}


def difference(factor, **added):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    model = GlmForCausalLM(GlmConfig(**SIZES, head_dim=16, rope_parameters=rope, initializer_range=0.3)).eval()
    folder = PLACE / f"glm-{factor}-{len(added)}"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | added))
    with torch.no_grad():
        right = model(input_ids=torch.tensor([IDS])).logits[0].numpy()
    found, _ = load_model(folder, strict=True)
    return float(np.abs(np.array(found(mx.array([IDS])))[0] - right).max() / np.abs(right).max())


half, twice, whole = difference(0.5), difference(0.5, partial_rotary_factor=0.5), difference(1.0)
print(f"half {half:.2g}, said at both places {twice:.2g}, whole heads {whole:.2g}")
sys.exit(not (half > 0.1 and twice > 0.1 and whole < 1e-4))
PY
"$place/venv/bin/python" "$place/glm.py" "$place" 2>/dev/null
