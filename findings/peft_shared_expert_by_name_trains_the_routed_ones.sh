#!/usr/bin/env bash
# Believed: target_modules=["shared_experts.down_proj"] trains the shared expert of a mixture and nothing else.
# So is: for families whose routed experts transformers 5 stacks, PEFT takes each target that ends in gate_proj, up_proj or down_proj for the
# routed experts, whatever stands before it: a whole path of the shared expert, and an expression for it, too. On GLM-4.5's classes
# the LoRA lands on all routed experts, and the shared expert, an ordinary linear, gets none. Qwen2-MoE's shared expert is trained as named.
# Seen: peft 0.21.2, transformers 5.23.0, torch 2.13.0, 2026-11-28; modules with LoRA:
#   glm4_moe: layers.1.mlp.experts, for a name, a whole path and an expression; qwen2_moe: layers.1.mlp.shared_expert.down_proj
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 2>/dev/null
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0 peft==0.21.2 2>/dev/null
cat >"$place/targets.py" <<'PY'
import sys

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
GLM = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
QWEN = {"num_experts": 4, "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
same = True
for family, more, shared, expected in (
    ("glm4_moe", GLM, "shared_experts", "layers.1.mlp.experts"),
    ("qwen2_moe", QWEN, "shared_expert", "layers.1.mlp.shared_expert.down_proj"),
):
    for targets in ([f"{shared}.down_proj"], [f"model.layers.1.mlp.{shared}.down_proj"], rf".*{shared}\.down_proj"):
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **HEADS, **more))
        model = get_peft_model(base, LoraConfig(target_modules=targets))
        names = (name for name, _ in model.named_parameters() if ".lora_A" in name)
        found = sorted({name.split(".lora_")[0].removeprefix("base_model.model.model.") for name in names})
        print(family, targets, "LoRA on", found)
        same = same and found == [expected]
sys.exit(0 if same else "changed")
PY
"$place/venv/bin/python" "$place/targets.py" 2>/dev/null
