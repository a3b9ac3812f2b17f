#!/usr/bin/env bash
# Believed: a prompt that goes through a model's cache in two pieces (chunked prefill, a prefix kept, the next turn of a chat) gives the
# logits of one pass. Where single tokens behind a prompt are right, longer pieces are too.
# So is: transformers' Mamba-1 classes (mamba, falcon_mamba) start the scan of a piece of several tokens from an empty state, though
# the cache of the piece before is given. Single steps are right, so `generate` is; Mamba-2 is right in both.
# Seen: transformers 5.23.0, torch 2.13.0 (CPU), 2026-11-28; largest difference to one pass, in standard deviations of its logits:
#   mamba 2 pieces 2.7e-02, steps 1.7e-06; falcon_mamba 2 pieces 6.0e-01, steps 1.6e-06; mamba2 2 pieces 1.2e-06, steps 2.5e-06
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0  2>/dev/null
cat >"$place/pieces.py" <<'PY'
import sys

import torch
from transformers import FalconMambaConfig, FalconMambaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1}
IDS = torch.randint(3, 200, (1, 24), generator=torch.Generator().manual_seed(0))


def off(model, cuts):
    """Largest difference to one pass of what pieces that end at `cuts` give, over the standard deviation of the logits."""
    with torch.no_grad():
        whole = model(input_ids=IDS, use_cache=False).logits[0]
        rows, start, given = [], 0, {}
        for end in cuts:
            out = model(input_ids=IDS[:, start:end], use_cache=True, **given)
            rows.append(out.logits[0])
            start, given = end, {"cache_params": out.cache_params}
    return float((torch.cat(rows) - whole).abs().max() / whole.std())


torch.manual_seed(0)
models = {
    "mamba": MambaForCausalLM(MambaConfig(state_size=8, **SIZES)),
    "mamba2": Mamba2ForCausalLM(Mamba2Config(**HEADS, **SIZES)),
    "falcon_mamba": FalconMambaForCausalLM(FalconMambaConfig(state_size=8, **SIZES)),
}
seen = {}
for name, model in models.items():
    pieces, steps = off(model.eval(), (12, 24)), off(model, (12, *range(13, 25)))
    seen[name] = pieces > 1e-3, steps > 1e-3
    print(f"{name}: 2 pieces {pieces:.1e}, steps {steps:.1e}")
sys.exit(0 if seen == {"mamba": (True, False), "mamba2": (False, False), "falcon_mamba": (True, False)} else "changed")
PY
"$place/venv/bin/python" "$place/pieces.py" 2>/dev/null
