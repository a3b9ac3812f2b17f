#!/usr/bin/env bash
# Believed: the attention implementations of transformers compute the same, but for rounding, and output_attentions only adds an output.
# So is: Falcon with alibi (Falcon-RW) puts the bias into the causal mask, and its eager attention adds it to the scores once more: keys
# count by twice the slopes of the training. SDPA, the default, takes the mask alone and is right. With output_attentions SDPA's layers
# go the eager way, so asking for attentions changes the logits. A reference made with attn_implementation="eager" is of another model.
# Half of the bias in the eager attention gives SDPA's logits.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29 (differences from SDPA of a random Falcon, in parts of the logits' spread):
#   eager: more than a tenth
#   sdpa with output_attentions: more than a tenth
#   eager with half of the bias: none
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
pip=("$place/venv/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0 2>/dev/null
"${pip[@]}" install transformers==5.23.0 2>/dev/null
cat >"$place/alibi.py" <<'PY'
import copy
import sys

import torch
from transformers import FalconConfig, FalconForCausalLM
from transformers.models.falcon import modeling_falcon

config = FalconConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=128, alibi=True,
    multi_query=False, parallel_attn=False, bias=True)
torch.manual_seed(0)
weights = {name: torch.randn_like(weight) * 0.3 if weight.dim() > 1 else weight.detach()
           for name, weight in FalconForCausalLM(copy.deepcopy(config)).state_dict().items()}
weights["lm_head.weight"] = weights["transformer.word_embeddings.weight"]


def logits(attention, **asked):
    model = FalconForCausalLM._from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(torch.arange(3, 43)[None], **asked).logits[0]


plain = logits("sdpa")
found = {"eager": logits("eager"), "sdpa with output_attentions": logits("sdpa", output_attentions=True)}
whole = modeling_falcon.build_alibi_tensor
modeling_falcon.build_alibi_tensor = lambda *given, **named: whole(*given, **named) / 2
found["eager with half of the bias"] = logits("eager")
seen = {}
for name, answer in found.items():
    difference = float((answer - plain).abs().max() / plain.std())
    seen[name] = "more than a tenth" if difference > 0.1 else "none" if difference < 1e-4 else f"{difference:.2g}"
    print(f"{name}: {seen[name]}")
sys.exit(0 if [*seen.values()] == ["more than a tenth", "more than a tenth", "none"] else "changed")
PY
"$place/venv/bin/python" "$place/alibi.py" 2>/dev/null
