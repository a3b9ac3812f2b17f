#!/usr/bin/env bash
# Believed: a decoder of transformers that gets past_key_values and no position_ids goes on behind the cache's last position, as the documented
# loop over `model(ids, past_key_values=cache)` needs.
# So is: Bamba takes positions 0, 1, … of each piece: its attention layers rotate the new queries and keys as if the text began again. `generate`
# passes positions and is right, so only loops of one's own (engines, evaluation by prefixes, speculation) see it. Nothing warns; with
# position_ids given the logits are those of one pass. Granite 4 with a rope, which has the same kinds of layers, counts on by itself.
# Seen: transformers 5.23.0, torch 2.13.0 (CPU), 2026-11-29; largest difference to one pass, in standard deviations of its logits:
#   bamba, no positions given: 2 pieces 1.2e+00, steps 1.7e+00; positions given: 2 pieces 2.8e-06, steps 3.1e-06
#   granitemoehybrid, no positions given: 2 pieces 4.0e-06, steps 7.5e-06
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 2>/dev/null
cat >"$place/positions.py" <<'PY'
import sys

import torch
from transformers import BambaConfig, BambaForCausalLM, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
IDS = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(0))


def off(model, cuts, given):
    """Largest difference to one pass of what pieces that end at `cuts` give, over the standard deviation of the logits."""
    with torch.no_grad():
        whole = model(input_ids=IDS, use_cache=False).logits[0]
        rows, start, cache = [], 0, None
        for end in cuts:
            positions = {"position_ids": torch.arange(start, end)[None]} if given else {}
            out = model(input_ids=IDS[:, start:end], use_cache=True, past_key_values=cache, **positions)
            rows.append(out.logits[0])
            start, cache = end, out.past_key_values
    return float((torch.cat(rows) - whole).abs().max() / whole.std())


def both(name, model, given):
    pieces, steps = off(model, (12, 20), given), off(model, (12, *range(13, 21)), given)
    print(f"{name}, {'positions given' if given else 'no positions given'}: 2 pieces {pieces:.1e}, steps {steps:.1e}")
    return pieces > 1e-3, steps > 1e-3


torch.manual_seed(0)
bamba = BambaForCausalLM(BambaConfig(attn_layer_indices=[1, 3], **SIZES, **HEADS, **MAMBA)).eval()
layers = {"layer_types": ["mamba", "attention", "mamba", "attention"], "position_embedding_type": "rope", "num_local_experts": 0}
granite = GraniteMoeHybridForCausalLM(
    GraniteMoeHybridConfig(num_experts_per_tok=0, shared_intermediate_size=96, mamba_expand=2, **layers, **SIZES, **HEADS, **MAMBA)
).eval()
seen = both("bamba", bamba, False), both("bamba", bamba, True), both("granitemoehybrid", granite, False)
sys.exit(0 if seen == ((True, True), (False, False), (False, False)) else "changed")
PY
"$place/venv/bin/python" "$place/positions.py" 2>/dev/null
