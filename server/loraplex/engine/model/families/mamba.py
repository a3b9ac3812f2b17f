"""Mamba-2 in the configs of Granite 4, Bamba and Nemotron-H."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import MambaKind, ModuleNames, SquaredKind

FIELDS = frozenset(
    {
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
        "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "position_embedding_type",
        "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "layers_block_type",
    }
)  # fmt: skip
"""Config fields of Granite 4 beside those that other families have too."""
BAMBA_FIELDS = frozenset(
    {"attn_layer_indices", "num_logits_to_keep", "z_loss_coefficient", "partial_rotary_factor"}
)
"""Those of Bamba beside them; transformers works the first and the last into others."""
NEMOTRON_FIELDS = frozenset(
    {
        "layers_block_type", "hybrid_override_pattern", "ssm_state_size", "mamba_num_heads", "mamba_head_dim",
        "n_groups", "conv_kernel", "use_conv_bias", "use_bias", "time_step_min", "time_step_limit",
        "attention_head_dim",
        # Without effect on a pass: of new weights, of kernels, of experts, of a head that predicts further tokens.
        "expand", "chunk_size", "time_step_max", "time_step_floor", "hidden_dropout", "num_logits_to_keep",
        "use_mamba_kernels", "rescale_prenorm_residual", "mamba_ssm_cache_dtype",
        "n_routed_experts", "output_router_logits", "n_shared_experts", "moe_intermediate_size",
        "moe_shared_expert_intermediate_size", "moe_latent_size", "moe_shared_expert_overlap", "num_experts_per_tok",
        "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "num_nextn_predict_layers",
        "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        # Other names of some of these, in files.
        "mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_dt_min", "mamba_dt_max", "mamba_dt_limit",
        "mamba_dt_init_floor", "mamba_conv_bias", "mamba_chunk_size",
    }
)  # fmt: skip
NEMOTRON_HARMLESS: dict[str, tuple[Any, ...]] = {
    "mamba_hidden_act": ("silu", "swish"),
    "mlp_hidden_act": ("relu2",),
    "mamba_proj_bias": (None, False),
    "residual_in_fp32": (None, False),
}
"""Values of fields that transformers computes by, whatever they say, and of activations that are served."""
NEMOTRON_NAMES = ModuleNames(embedding="embeddings", input_norm="norm", mixer="mixer", final_norm="norm_f")
_GRANITE_NAMES = (
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias",
    "mamba_proj_bias",
)  # fmt: skip
_NEMOTRON_NAMES = (
    "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "use_bias",
)  # fmt: skip
_UNREAD = {
    "rms_norm_eps": "layer_norm_epsilon",
    "attention_head_dim": "head_dim",
    "hidden_act": "mlp_hidden_act",
}
"""Fields of Nemotron-H's files that transformers does not read, and those that it reads in their place."""
_MOST_WIDTH = 4
_STEP = 16
"""Sizes of heads are multiples of this."""


def granite_kind(config: Any) -> MambaKind:
    """Raises ModelUnsupported."""
    return _kind(config, _GRANITE_NAMES, config.time_step_limit or (0.0, math.inf))


def nemotron_kind(config: Any) -> MambaKind:
    """Raises ModelUnsupported."""
    # Of a pass over a text: transformers' steps by its cache have no limit.
    return _kind(config, _NEMOTRON_NAMES, (config.time_step_min, math.inf))


def squared_kind(config: Any) -> SquaredKind:
    return SquaredKind(CacheKind(0, 0), config.intermediate_size, bool(config.mlp_bias))


def rotates(config: Any) -> bool:
    return bool(config.position_embedding_type == "rope")


def check_nemotron(config: Any, raw: Mapping[str, Any]) -> None:
    """Raises ModelUnsupported for fields that transformers does not read, where they say something else than it
    computes."""
    read = {"num_hidden_layers": "layers_block_type", **_UNREAD}
    meant = {name: getattr(config, own) for name, own in _UNREAD.items()}
    meant["num_hidden_layers"] = len(config.layers_block_type)
    for name, value in meant.items():
        if raw.get(name, value) not in (None, value):
            raise ModelUnsupported(
                f"the config's {name} is {shown(raw[name])}, and its {read[name]} says {shown(value)}: transformers "
                "reads the second alone"
            )
    pattern = raw.get("hybrid_override_pattern")
    if pattern is not None and pattern != config.hybrid_override_pattern:
        raise ModelUnsupported(
            f"hybrid_override_pattern {shown(pattern)} and layers_block_type name other layers: transformers reads the "
            "second alone"
        )
    low, high = map(float, config.time_step_limit or (0.0, math.inf))
    if low not in (0.0, config.time_step_min) or high != math.inf:
        raise ModelUnsupported(
            f"time_step_limit {shown(config.time_step_limit)} is not served: transformers has the time_step_min as the "
            "only limit"
        )
    for name in ("rope_scaling", "tie_word_embeddings"):
        if raw.get(name):
            raise ModelUnsupported(
                f"the config's {name} is {shown(raw[name])}, which {config.model_type} has not"
            )


def _kind(config: Any, names: tuple[str, ...], limits: Any) -> MambaKind:
    """`names`: of the fields for heads, their size, groups, states, the convolution's width and both biases."""
    sizes = {name: getattr(config, name) for name in names[:5]}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= 1 << 16:
            raise ModelUnsupported(f"the config's {name} is {shown(size)}, not a number from 1 to {1 << 16}")
    heads, head_dim, groups, state_dim, width = sizes.values()
    for name in (names[1], names[3]):
        if sizes[name] % _STEP:
            raise ModelUnsupported(
                f"{name} {sizes[name]} is no multiple of {_STEP}, which Mamba-2 is served with"
            )
    if heads % groups:
        raise ModelUnsupported(f"{names[0]} {heads} is no multiple of {names[2]} {groups}")
    if not 2 <= width <= _MOST_WIDTH:
        raise ModelUnsupported(
            f"{names[4]} {width} is not served; convolutions of states have 2 to {_MOST_WIDTH}"
        )
    low, high = map(float, limits)
    if not 0 <= low <= high:
        raise ModelUnsupported(f"{shown(limits)} is no range of a Mamba-2's steps")
    return MambaKind(
        CacheKind(0, 0),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=state_dim,
        width=width,
        conv_bias=bool(getattr(config, names[5])),
        bias=bool(getattr(config, names[6])),
        # The largest number of float32 in place of none: kept plans are JSON.
        steps=(low, min(high, 3e38)),
    )
