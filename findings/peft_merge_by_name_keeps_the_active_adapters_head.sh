#!/usr/bin/env bash
# Believed: merge_and_unload(adapter_names=["second"]) gives the model that answers as that adapter does, whichever one is active.
# So is: LoRA and trained tokens are those of the adapter that is named; of modules_to_save the active adapter's copies are taken. Two classifiers
# in one model, merged by name, both get the head of the active one, over their own LoRA. No error and no warning. set_adapter("second")
# before the merge makes it right.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), 2026-12-01; largest difference from the second adapter, the first one being active:
#   LoRA alone 3e-08, trained tokens 3e-08; a classifier's head 6 of an effect of 1.9, and the head is the first one's;
#   second made active before: all below 1e-05
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/named.py" <<'PY'
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForSequenceClassification

place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12]])


def base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=64, num_labels=3, pad_token_id=0, **sizes)).eval()


def scores(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[0]


def saved(name, seed, options):
    model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(place / name)
    return scores(PeftModel.from_pretrained(base(), place / name))


def both():
    model = PeftModel.from_pretrained(base(), place / "first", adapter_name="first")
    model.load_adapter(place / "second", "second")
    return model


CASES = {"LoRA alone": {}, "trained tokens": {"trainable_token_indices": [5, 12]}, "a classifier's head": {"task_type": "SEQ_CLS"}}
seen = {}
for name, options in CASES.items():
    saved("first", 3, options)
    right = saved("second", 4, options)
    model = both()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        merged = model.merge_and_unload(adapter_names=["second"])
    off = float((scores(merged) - right).abs().max())
    model = both()
    model.set_adapter("second")
    active = float((scores(model.merge_and_unload(adapter_names=["second"])) - right).abs().max())
    heads = []
    if options.get("task_type"):
        whose = both().base_model.model.score.modules_to_save
        heads = [bool(torch.equal(merged.score.weight, whose[each].weight)) for each in ("first", "second")]
    seen[name] = off > 0.05, heads
    effect = float((right - scores(base())).abs().max())
    print(f"{name}: {off:.1g} of an effect of {effect:.2g}; active {active:.1g}; head of first, of second {heads}; warnings {len(told)}")
    assert active < 1e-5 and not told
sys.exit(0 if seen == dict(zip(CASES, [(False, []), (False, []), (True, [True, False])], strict=True)) else "changed")
PY
"$place/venv/bin/python" "$place/named.py" "$place" 2>/dev/null
