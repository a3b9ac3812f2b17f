#!/usr/bin/env bash
# Believed: add_weighted_adapter of one adapter with weight 1 gives that adapter back.
# So is: it multiplies each part by its scaling, sets lora_alpha to the new rank r, and keeps use_rslora. The scaling of the merge is
# then alpha / sqrt(r) = sqrt(r), not 1: a merge of rsLoRA adapters acts sqrt(r) times too strongly, by cat, linear and svd alike.
# Seen: peft 0.21.2, torch 2.13.0, transformers 5.23.0, 2026-11-28; |merged change| / |change of the adapter| at rank 16:
#   use_rslora False: cat 1.00 linear 1.00 svd 1.00; use_rslora True: cat 4.00 linear 4.00 svd 4.00
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/merge.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
same = True
for stabilised in (False, True):
    for kind in ("cat", "linear", "svd"):
        torch.manual_seed(0)
        base = LlamaForCausalLM(LlamaConfig(vocab_size=128, **SIZES))
        config = LoraConfig(r=16, lora_alpha=32, use_rslora=stabilised, target_modules=["q_proj"])
        model = get_peft_model(base, config, "one")
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.1)
        model.add_weighted_adapter(["one"], [1.0], "merged", combination_type=kind)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        ratio = float(layer.get_delta_weight("merged").norm() / layer.get_delta_weight("one").norm())
        print(f"use_rslora {stabilised}: {kind} {ratio:.2f}")
        same = same and abs(ratio - (4 if stabilised else 1)) < 0.01
sys.exit(0 if same else "changed")
PY
"$place/venv/bin/python" "$place/merge.py" 2>/dev/null
