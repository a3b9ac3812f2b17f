#!/usr/bin/env bash
# Believed: a causal classifier (…ForSequenceClassification) of transformers pools the last token that attention_mask keeps.
# So is: the mask is not looked at. The last id that is not config.pad_token_id is pooled. Where padding is the token that ends a turn
# (SmolLM2, Qwen: common) a text that ends with it is judged at the token before, alone and in a batch; the same weights under a config
# without pad_token_id judge it at the end. A masked tail of ordinary ids is pooled. A server that pools the last token of a prompt differs.
# Seen: transformers 5.23.0, torch 2.13.0, 2026-11-29; position that the logits are of, of ids 5 6 7 2 (2 ends a turn):
#   pad_token_id None: 3; pad_token_id 0: 3; pad_token_id 2: 2; pad_token_id 0, mask 1 1 0 0: 3; pad_token_id 2, all ids 2: 0
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 2>/dev/null
cat >"$place/pooled.py" <<'PY'
import sys

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


def position(pad, ids, mask=None):
    """Where in the text the answer's logits come from."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=16, num_labels=3, pad_token_id=pad, **SIZES)).eval()
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask or [1] * len(ids)])}
    with torch.no_grad():
        logits = model(**given).logits[0]
        each = model.score(model.model(**given).last_hidden_state[0])
    return int((each - logits).abs().amax(-1).argmin())


turn = [5, 6, 7, 2]
seen = {
    "no padding token": position(None, turn),
    "another padding token": position(0, turn),
    "padding that ends a turn": position(2, turn),
    "a masked tail": position(0, turn, [1, 1, 0, 0]),
    "nothing but padding": position(2, [2, 2, 2, 2]),
}
print(seen)
sys.exit(list(seen.values()) != [3, 3, 2, 3, 0])
PY
"$place/venv/bin/python" "$place/pooled.py" 2>/dev/null
