#!/usr/bin/env bash
# Believed: PEFT's save_as_lora(path, model, rank, adapter_name="one") writes adapter "one" as a LoRA: its deltas, and its own head.
# So is: the deltas are those of the adapter that is named; of modules_to_save it goes through the copies of all adapters and writes each under
# the same name, so that the last adapter's head stays. Two LoHa classifiers in one model, converted one by one to be served as LoRA, both get
# the head of the second. No error; with one adapter in the model it is right. Load each adapter alone before you convert it.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), 2026-11-29; largest differences of the class scores after loading it again:
#   beside another adapter: one is off 2.55, two is off 7.15e-07; alone: one is off 1.07e-06
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/heads.py" <<'PY'
import sys
from pathlib import Path

import torch
from peft import LoHaConfig, PeftModel, get_peft_model, save_as_lora
from transformers import LlamaConfig, LlamaForSequenceClassification

place = Path(sys.argv[1])


def base():
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 3, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(initializer_range=0.15, **sizes, **heads)).eval()


def scores(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 30)[None]).logits


def off(names, folder):
    """How far each adapter of one model is from its own scores, once it is converted and loaded into a new base."""
    config = LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False, task_type="SEQ_CLS")
    torch.manual_seed(1)
    model = get_peft_model(base(), config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    for name, weight in model.named_parameters():
        if ".modules_to_save." in name:
            weight.data.normal_(0, 0.2)
    found = {}
    for name in names:
        model.set_adapter(name)
        trained = scores(model.eval())
        save_as_lora(place / folder / name, model, rank=32, adapter_name=name)
        found[name] = float((scores(PeftModel.from_pretrained(base(), place / folder / name).eval()) - trained).abs().max())
    print(f"{folder}:", ", ".join(f"{name} is off {value:.3g}" for name, value in found.items()))
    return found


both, alone = off(["one", "two"], "beside another adapter"), off(["one"], "alone")
sys.exit(0 if both["one"] > 0.1 and both["two"] < 1e-3 and alone["one"] < 1e-3 else "changed")
PY
"$place/venv/bin/python" "$place/heads.py" "$place" 2>/dev/null
