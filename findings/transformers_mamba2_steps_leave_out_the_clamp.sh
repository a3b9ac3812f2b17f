#!/usr/bin/env bash
# Believed: what transformers computes of a text step by step, through its cache, is what one pass over the text computes, but for rounding.
# So is: Mamba-2's steps in time are clamped in the pass over several tokens (dt_limit of the chunked scan), and not in the update of one
# token. Nemotron-H and Zamba2 make the limit of time_step_min, a number for the initialisation of weights, whose default is 0.001; the
# time_step_limit of Nemotron-H's config, 0 to infinity, is not read. So generate() continues another function than the one that a
# training or a score sees, wherever softplus(dt + dt_bias) is smaller. Without the limit both agree.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29 (a random Nemotron-H with dt_bias of -6; differences in parts of the logits' spread):
#   time_step_min 0.001: config.time_step_limit (0.0, inf), steps and one pass differ by more than a tenth: True
#   time_step_min 1e-12: config.time_step_limit (0.0, inf), steps and one pass differ by more than a tenth: False
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 2>/dev/null
cat >"$place/steps.py" <<'PY'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

seen = {}
for least in (0.001, 1e-12):
    config = AutoConfig.for_model(
        "nemotron_h", vocab_size=64, hidden_size=32, intermediate_size=48, layers_block_type=["mamba", "attention", "mamba"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1,
        ssm_state_size=16, chunk_size=16, time_step_min=least, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.5)
        elif name.endswith("dt_bias"):
            weight.data.fill_(-6.0)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits[0]
        cache, rows = DynamicCache(config=config), []
        for position in range(ids.shape[1]):
            step = {"input_ids": ids[:, position : position + 1], "position_ids": torch.tensor([[position]])}
            rows.append(model(**step, past_key_values=cache, use_cache=True).logits[0])
    difference = float((torch.cat(rows) - whole).abs().max() / whole.std())
    seen[least] = difference > 0.1
    print(f"time_step_min {least}: config.time_step_limit {config.time_step_limit}, "
          f"steps and one pass differ by more than a tenth: {seen[least]}")
    if not seen[least] and difference > 1e-4:
        sys.exit("changed")
sys.exit(0 if seen == {0.001: True, 1e-12: False} else "changed")
PY
"$place/venv/bin/python" "$place/steps.py" 2>/dev/null
