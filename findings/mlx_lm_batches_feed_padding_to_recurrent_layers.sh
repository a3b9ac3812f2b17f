#!/usr/bin/env bash
# Believed: a prompt that mlx-lm answers in a batch (batch_generate, and mlx_lm.server where requests meet) is answered as alone.
# So is: prompts of a batch are padded on the right to the longest, and it is left to each family to keep its recurrent states from
# reading on. Granite 4 and Mamba 2 do. Mamba, Jamba and Ling-linear read the padding; Nemotron-H masks it and still takes its
# states behind it. A shorter prompt then goes on from a state that depends on the longest one beside it. Nothing warns.
# Seen: mlx-lm 0.32.2, mlx 0.32.4 (CPU), 2026-11-30; the largest difference of log probabilities of the first token, of 3 tokens beside
#   41, float32: mamba 0.86, jamba 1.2, bailing_moe_linear 2.1, nemotron_h 0.047 (random weights); 0 for granitemoehybrid and mamba2, and
#   0 for all beside prompts of its own length
set -euo pipefail
place=$(mktemp -d); trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check "mlx[cpu]==0.32.4" mlx-lm==0.32.2 2>/dev/null
cat >"$place/batch.py" <<'PY'
import importlib
import sys

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

mx.set_default_device(mx.cpu)
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": 1e4}
MAMBA2 = {"conv_kernel": 4, "n_groups": 1, "ssm_state_size": 16, "use_conv_bias": True, "use_bias": False}
FAMILIES = {
    "mamba": {"state_size": 8, "num_hidden_layers": 3, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1,
    },
    "bailing_moe_linear": {
        "num_hidden_layers": 4, "layer_group_size": 2, "group_norm_size": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_bias": False,
        "use_qkv_bias": False, "use_qk_norm": True, "n_group": 1, "topk_group": 1, "moe_router_enable_expert_bias": False,
        "routed_scaling_factor": 1.0, "score_function": "sigmoid",
    },
    "nemotron_h": {
        **MAMBA2, "num_hidden_layers": 4, "attention_bias": False, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_proj_bias": False,
        "mlp_bias": False, "layer_norm_epsilon": 1e-5, "hybrid_override_pattern": ["M", "*", "M", "-"],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_proj_bias": False,
        "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True, "attention_bias": False,
        "embedding_multiplier": 1.0, "attention_multiplier": 0.25, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "shared_intermediate_size": 96, "position_embedding_type": "nope", "num_local_experts": 2, "num_experts_per_tok": 1,
        "mamba_expand": 1,
    },
    "mamba2": {
        "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16, "conv_kernel": 4, "use_bias": False,
        "use_conv_bias": True, "n_groups": 1, "time_step_rank": 4, "layer_norm_epsilon": 1e-5, "time_step_limit": (0.0, 1e6),
        "ssm_state_size": 16, "max_position_embeddings": 512, "expand": 1, "chunk_size": 32,
    },
}


def answers(model, prompts):
    """The log probabilities of each prompt's first token."""
    batch = BatchGenerator(model, max_tokens=1, prefill_batch_size=8)
    ids, found = batch.insert(prompts, [1] * len(prompts)), {}
    while len(found) < len(ids):
        found |= {each.uid: each.logprobs.astype(mx.float32) for each in batch.next_generated()}
    return [found[number] for number in ids]


def prompt(length, step):
    return [5 + number * step % 97 for number in range(length)]


seen = {}
for name, sizes in FAMILIES.items():
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **SIZES, **sizes}))
    model.eval()
    (alone,) = answers(model, [prompt(3, 7)])
    beside_long, beside_equal = (answers(model, [prompt(3, 7), prompt(length, 11)])[0] for length in (41, 3))
    seen[name] = [float(mx.abs(other - alone).max()) for other in (beside_long, beside_equal)]
    print(f"{name}: beside a longer prompt {seen[name][0]:.2g}, beside one of its length {seen[name][1]:.2g}")
wrong = {name for name, (longer, _) in seen.items() if longer > 2e-3}
print("wrong:", sorted(wrong))
same = all(equal < 1e-4 for _, equal in seen.values())
sys.exit(not (same and wrong == {"mamba", "jamba", "bailing_moe_linear", "nemotron_h"}))
PY
"$place/venv/bin/python" "$place/batch.py"
