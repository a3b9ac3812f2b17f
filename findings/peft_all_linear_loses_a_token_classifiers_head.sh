#!/usr/bin/env bash
# Believed: target_modules="all-linear" leaves a classifier's head to modules_to_save, for TOKEN_CLS as for SEQ_CLS.
# So is: for TOKEN_CLS the head becomes a LoRA layer and PEFT then fails to save it whole, with a TypeError about peft's own Linear. Without
# task_type it trains, for both kinds of classifier: the head is a LoRA over weights that from_pretrained made at random and that nobody saves,
# so the adapter loads again without a word and judges by another head. A task_type of SEQ_CLS, or the projections by name, keep the head.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-29; largest difference of logits between what was saved and what was loaded:
#   sequence SEQ_CLS 0, without task_type above 0.1; token TOKEN_CLS TypeError, by name 0, without task_type above 0.1
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/head.py" <<'PY'
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

PLACE = sys.argv[1]
IDS = torch.tensor([[5, 6, 7, 8]])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=16, pad_token_id=0, **SIZES)).save_pretrained(f"{PLACE}/base")


def difference(kind, **options):
    """Between the logits of an adapter as it was trained and as it is loaded again."""
    torch.manual_seed(1)
    trained = get_peft_model(kind.from_pretrained(f"{PLACE}/base", num_labels=3), LoraConfig(r=4, **options)).eval()
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    trained.save_pretrained(f"{PLACE}/adapter")
    torch.manual_seed(2)
    loaded = PeftModel.from_pretrained(kind.from_pretrained(f"{PLACE}/base", num_labels=3), f"{PLACE}/adapter").eval()
    with torch.no_grad():
        return float((trained(input_ids=IDS).logits - loaded(input_ids=IDS).logits).abs().max())


def of(*arguments, **options):
    try:
        return round(difference(*arguments, **options), 3)
    except TypeError as error:
        return f"TypeError: {error}"


sequence, token = LlamaForSequenceClassification, LlamaForTokenClassification
seen = {
    "sequence, SEQ_CLS": of(sequence, task_type="SEQ_CLS", target_modules="all-linear"),
    "sequence, no task": of(sequence, target_modules="all-linear"),
    "token, TOKEN_CLS": of(token, task_type="TOKEN_CLS", target_modules="all-linear"),
    "token, TOKEN_CLS by name": of(token, task_type="TOKEN_CLS", target_modules=["q_proj", "v_proj", "down_proj"]),
    "token, no task": of(token, target_modules="all-linear"),
}
for name, found in seen.items():
    print(f"{name}: {found}")
first, second, third, fourth, fifth = seen.values()
sys.exit(not (first == fourth == 0 and second > 0.1 and fifth > 0.1 and "peft" in str(third)))
PY
"$place/venv/bin/python" "$place/head.py" "$place" 2>/dev/null
