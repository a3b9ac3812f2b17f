"""A tiny random checkpoint of any text decoder of the installed transformers: the family's default config, shrunk by
the names of its fields, with every kind of layer that the default has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 512
_HIDDEN = ("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "dense_intermediate_size")
_EXPERT = (
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "expert_intermediate_size",
)  # fmt: skip
_SMALL: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_LAYERS, 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "swa_head_dim", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_EXPERT, 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "sliding_window"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "max_position_embeddings"), VOCAB),
    **dict.fromkeys(("num_kv_shared_layers", "num_nextn_predict_layers", "pad_token_id"), 0),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "linear_num_key_heads": 1, "linear_num_value_heads": 3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_CHANGES: dict[str, dict[str, Any]] = {
    # Layers of attention alone; the default's are all of a Mamba.
    "granitemoehybrid": {
        "layer_types": ["full_attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
    },
    "gemma4_text": {"global_head_dim": 32},
    # Without the experts of the default.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "mamba_num_heads": 4,
        "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16,
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
}  # fmt: skip
"""What the fields' names don't tell, by family."""


def read_field(config: Any, name: str) -> Any:
    """None where a config has no such field, or one for each layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers names no number for layers that differ
        return None


def small_config(family: str, **changes: Any) -> Any:
    """The config of a `model_type`, with these fields on top."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    default = config_class()
    fields = (
        getattr(config_class, "__dataclass_fields__", None) or default.to_dict()
    )  # the last: transformers 4
    values = {
        name: value
        for name, value in _SMALL.items()
        # A list, or none, in the default means something else than a number.
        if name in fields and not isinstance(read_field(default, name), list | tuple)
    }
    for name in _KINDS:
        kinds = getattr(default, name, None) if name in fields else None
        if isinstance(kinds, list) and kinds:
            values[name] = _stretch(kinds)
    return config_class(**(values | _CHANGES.get(family, {}) | changes))


def _stretch(kinds: list[Any]) -> list[Any]:
    """Four layers of a model that have each kind of its layers."""
    distinct = set(kinds)
    for first in range(len(kinds) - 3):
        if set(kinds[first : first + 4]) == distinct:
            return kinds[first : first + 4]
    order = list(dict.fromkeys(kinds))
    return [order[index % len(order)] for index in range(4)]


def save_family(family: str, out: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Safetensors and config.json in float32. Weights are larger than usual, so that an error anywhere shows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(small_config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.copy_(weight.data + 0.1 * noise if weight.dim() < 2 else 0.15 * noise)
    model.save_pretrained(out)
    return out
