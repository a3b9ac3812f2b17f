#!/usr/bin/env bash
# Believed: target_modules=["gate_proj", "up_proj", "down_proj", …] gives LoRA to every linear of such a name, and "all-linear" to every linear.
# So is: where PEFT takes these names for a mixture's stacked experts (qwen3_moe, glm4_moe, olmoe), they stand for the experts alone: the linears
# of the same names in the dense first layers and in the shared experts get no LoRA. "all-linear" leaves the same linears out, and trains the
# router, which is no linear. In qwen2_moe it is the other way round: dense layers and shared experts are trained, the experts are not; in mixtral
# the seven names train no expert, in gpt_oss neither recipe does. No warning says so; adapter_config.json names all seven in each case.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-29 (trained and left out, of gate/up/down):
#   glm4_moe seven: experts; left out: dense, shared      glm4_moe all-linear: experts, router; left out: dense, shared
#   qwen3_moe seven: experts; left out: dense             qwen3_moe all-linear: experts, router; left out: dense
#   qwen2_moe seven: dense, shared; left out: experts     qwen2_moe all-linear: dense, shared; left out: experts
#   mixtral seven: nothing; left out: experts             mixtral all-linear: experts, router; left out: nothing
#   gpt_oss seven: nothing; left out: experts             gpt_oss all-linear: nothing; left out: experts
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/recipes.py" <<'PY'
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COMMON = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
FAMILIES = {
    "glm4_moe": {"moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "mlp_only_layers": [0]},
    "qwen2_moe": {"moe_intermediate_size": 32, "num_experts": 4, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}
WANT = {
    ("glm4_moe", "seven"): "experts; left out: dense, shared",
    ("glm4_moe", "all-linear"): "experts, router; left out: dense, shared",
    ("qwen3_moe", "seven"): "experts; left out: dense",
    ("qwen3_moe", "all-linear"): "experts, router; left out: dense",
    ("qwen2_moe", "seven"): "dense, shared; left out: experts",
    ("qwen2_moe", "all-linear"): "dense, shared; left out: experts",
    ("mixtral", "seven"): "nothing; left out: experts",
    ("mixtral", "all-linear"): "experts, router; left out: nothing",
    ("gpt_oss", "seven"): "nothing; left out: experts",
    ("gpt_oss", "all-linear"): "nothing; left out: experts",
}


def part(name):
    if "self_attn" in name or "layers." not in name:
        return None
    if ".shared_expert" in name:
        return "shared" if "_proj" in name else None
    if ".experts" in name:
        return "experts"
    return "dense" if "_proj" in name else "router"


def compare(family, recipe):
    config = AutoConfig.for_model(family, **COMMON, head_dim=16, intermediate_size=32, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    linears = {part(name) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    there = (linears | {"experts"}) - {None, "router"}
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=SEVEN if recipe == "seven" else recipe))
    trained = {part(name) for name, _ in adapted.named_parameters() if ".lora_A" in name} - {None}
    return f"{', '.join(sorted(trained)) or 'nothing'}; left out: {', '.join(sorted(there - trained)) or 'nothing'}"


seen = {(family, recipe): compare(family, recipe) for family in FAMILIES for recipe in ("seven", "all-linear")}
for (family, recipe), line in seen.items():
    print(f"{family} {recipe}: {line}")
sys.exit(0 if seen == WANT else "changed")
PY
"$place/venv/bin/python" "$place/recipes.py" 2>/dev/null
