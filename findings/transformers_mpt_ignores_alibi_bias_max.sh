#!/usr/bin/env bash
# Believed: transformers' MPT computes what its config describes; the documentation of MptConfig explains each field of attn_config.
# So is: nothing reads attn_config's alibi, alibi_bias_max and qk_ln, nor logit_scale. The bias is always there, with slopes of a maximum
# of 8: a long-context MPT whose slopes were trained with alibi_bias_max 16 is answered with those of 8, without a warning, and one
# without ALiBi gets it. no_bias false makes no biases: those of a checkpoint are unexpected keys, and are left out.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29 (a random MPT; each beside the defaults):
#   alibi_bias_max 16: the same bits
#   alibi False: the same bits
#   qk_ln True: the same bits
#   logit_scale 0.5: the same bits
#   softmax_scale 0.5: others
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 2>/dev/null
cat >"$place/fields.py" <<'PY'
import sys

import torch
from transformers import MptConfig, MptForCausalLM

sizes = {"vocab_size": 64, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}


def logits(attention, **whole):
    torch.manual_seed(0)
    model = MptForCausalLM(MptConfig(**sizes, attn_config=attention, **whole)).eval()
    for weight in model.parameters():
        weight.data.normal_(0, 0.3)
    with torch.no_grad():
        return model(torch.arange(3, 43)[None]).logits[0]


plain, seen = logits({}), []
for name, value in (("alibi_bias_max", 16), ("alibi", False), ("qk_ln", True), ("logit_scale", 0.5), ("softmax_scale", 0.5)):
    answer = logits({}, logit_scale=value) if name == "logit_scale" else logits({name: value})
    seen.append(torch.equal(answer, plain))
    print(f"{name} {value}: {'the same bits' if seen[-1] else 'others'}")
sys.exit(0 if seen == [True] * 4 + [False] else "changed")
PY
"$place/venv/bin/python" "$place/fields.py" 2>/dev/null
