#!/usr/bin/env bash
# Believed: `axolotl merge-lora` merges an adapter that axolotl has trained, or says what it leaves out, as PEFT's merge_and_unload does.
# So is: its default (merge_method memory_efficient) goes through the base's files, weight by weight, and looks for lora_A and lora_B or a whole
# weight of the same name. It does not look for lora_embedding_A (LoRA on embed_tokens), trainable_tokens_delta (peft_trainable_token_indices)
# and whole biases (bias: all), nor for a head that the base's files do not have because it is tied. They are left out: one line of
# INFO counts what was merged. With merge_method legacy PEFT merges all of these.
# Seen: axolotl 0.19.0 with its peft 0.20.0 and transformers 5.16.1, torch 2.13.0 (CPU), 2026-12-01; largest difference of logits from the adapter's:
#   plain 1e-07, use_dora 1e-07, lm_head as a whole 1e-06; LoRA on embed_tokens 0.5 of an effect of 0.52, trained tokens 0.4 of 0.44,
#   bias all 0.2 of 0.46, a tied lm_head as a whole 4 of 4.1. Merged by PEFT: all below 1e-05
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.16.1 peft==0.20.0 safetensors==0.8.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check colorama==0.4.6 requests==2.34.2 fire==0.7.1 pydantic==2.14.4 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0 2>/dev/null
cat >"$place/merge.py" <<'PY'
import logging
import sys
from pathlib import Path

import torch
from axolotl.cli.utils.lora_merge import LOG, merge_lora_sharded_efficient
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

place = Path(sys.argv[1])
IDS = torch.tensor([[1, 2, 3, 5, 7, 8, 9, 5, 11, 12, 60, 61]])
CASES = {
    "plain": (False, {}),
    "use_dora": (False, {"use_dora": True}),
    "lm_head as a whole": (False, {"modules_to_save": ["lm_head"]}),
    "LoRA on embed_tokens": (False, {"target_modules": ["q_proj", "embed_tokens"]}),
    "trained tokens": (False, {"trainable_token_indices": [60, 61]}),
    "bias all": (False, {"bias": "all"}),
    "a tied lm_head as a whole": (True, {"modules_to_save": ["lm_head"]}),
}
told = []


class Told(logging.Handler):
    def emit(self, record):
        told.append(record.getMessage())


def base(tied):
    """Saves a Qwen 2 of random weights, biases included; its folder."""
    folder = place / f"base-{tied}"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", vocab_size=64, tie_word_embeddings=tied, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[0]


seen = {}
LOG.logger.addHandler(Told(logging.WARNING))
LOG.warning("heard")
for name, (tied, options) in CASES.items():
    folder, adapter, merged = base(tied), place / f"{name}-adapter", place / f"{name}-merged"
    options = {"target_modules": ["q_proj", "v_proj"], **options}
    model = AutoModelForCausalLM.from_pretrained(folder)
    without = logits(model)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    right = logits(model)
    by_peft = float((logits(model.merge_and_unload()) - right).abs().max())
    merge_lora_sharded_efficient(folder, adapter, merged, device="cpu")
    off = float((logits(AutoModelForCausalLM.from_pretrained(merged)) - right).abs().max())
    print(f"{name}: {off:.1g} of an effect of {float((right - without).abs().max()):.2g}; by PEFT {by_peft:.1g}")
    seen[name] = off > 0.05
    assert by_peft < 1e-5
print("warnings of axolotl:", told[1:])
sys.exit(0 if list(seen.values()) == [False] * 3 + [True] * 4 and told == ["heard"] else "changed")
PY
"$place/venv/bin/python" "$place/merge.py" "$place" 2>/dev/null | grep "effect\|warnings of"
