#!/usr/bin/env bash
# Believed: target_modules with the seven usual names trains every linear that has one of them.
# So is: where transformers 5 stacks a family's experts, PEFT moves gate_proj, up_proj and down_proj to `target_parameters` and takes them
# out of `target_modules`. On GLM-4.5's classes the shared experts and the dense first layer, which are ordinary linears of these very
# names, are then no targets: nothing of them is trained or saved, without a warning, and gate_up has twice the rank that was asked.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28:
#   linears of these names: 6; of them trained: 0; trained: mlp.experts, mlp.experts.base_layer; rank_pattern gate_up_proj 16 (asked 8)
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/targets.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

MLP = ("gate_proj", "up_proj", "down_proj")
experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
model = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, **sizes, **experts))
linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name.endswith(MLP)}
adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", *MLP]))
prefix = "base_model.model."
trained = {name.split(".lora_")[0].removeprefix(prefix) for name, _ in adapted.named_parameters() if ".lora_" in name}
mlp = sorted(name.split(".", 3)[3] for name in trained if ".mlp." in name)
ranks = adapted.peft_config["default"].rank_pattern
print("linears of these names:", len(linears), "of them trained:", len(linears & trained), "trained:", mlp, "rank_pattern:", ranks)
same = len(linears) == 6 and not linears & trained and mlp == ["mlp.experts", "mlp.experts.base_layer"] and 16 in ranks.values()
sys.exit(0 if same else "changed")
PY
"$place/venv/bin/python" "$place/targets.py" 2>/dev/null
