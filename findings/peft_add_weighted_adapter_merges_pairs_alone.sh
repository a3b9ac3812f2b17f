#!/usr/bin/env bash
# Believed: add_weighted_adapter of one plain adapter (no rsLoRA) with weight 1 gives that adapter back, and a merge of several has all that they
# trained, or is refused, as target_parameters are.
# So is: it merges lora_A and lora_B. The new adapter has the first one's config, and so a head, tokens and DoRA magnitudes of its own: new ones,
# as get_peft_model begins with. A merged classifier has the head that from_pretrained made at random. No error and no warning, by
# cat, linear, svd and ties alike; save_pretrained writes it all. Copy these parts from an adapter to the merge, or merge plain LoRA only.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU), 2026-11-29; a merge of one adapter with weight 1, logits beside the adapter's:
#   plain                    off 4.92e-06 of an effect of 6.31
#   head of a classifier     off 2.6 of an effect of 3.75
#   trainable_token_indices  off 4.66 of an effect of 4.74
#   use_dora                 off 2.14 of an effect of 4.86
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 2>/dev/null
cat >"$place/merge.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

KINDS = {
    "plain": (LlamaForCausalLM, {}),
    "head of a classifier": (LlamaForSequenceClassification, {"task_type": "SEQ_CLS"}),
    "trainable_token_indices": (LlamaForCausalLM, {"trainable_token_indices": [5, 6, 7]}),
    "use_dora": (LlamaForCausalLM, {"use_dora": True}),
}
PARTS = ("lora_B", "modules_to_save", "trainable_tokens", "magnitude")


def base(kind):
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 3, "pad_token_id": 0}
    return kind(LlamaConfig(initializer_range=0.15, **sizes, **heads)).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 30)[None]).logits


seen = {}
for name, (kind, options) in KINDS.items():
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    model = get_peft_model(base(kind), config, adapter_name="one")
    for path, weight in model.named_parameters():
        if ".one" in path and any(part in path for part in PARTS):
            weight.data.add_(torch.randn_like(weight) * 0.2)
    trained = logits(model)
    model.add_weighted_adapter(["one"], [1.0], "merge", combination_type="linear")
    model.set_adapter("merge")
    off = float((logits(model) - trained).abs().max())
    print(f"{name:24} off {off:.3g} of an effect of {float((trained - logits(base(kind))).abs().max()):.3g}")
    seen[name] = off > 1e-2
sys.exit(0 if seen == {name: name != "plain" for name in KINDS} else "changed")
PY
"$place/venv/bin/python" "$place/merge.py" 2>/dev/null
