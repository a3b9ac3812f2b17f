"""The parts of Granite 4's configs that no other family has."""

from __future__ import annotations

import math
from typing import Any

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import MambaKind

FIELDS = frozenset(
    {
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
        "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "position_embedding_type",
        "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "layers_block_type",
    }
)  # fmt: skip
"""Config fields beside those that other families have too."""
_MOST_WIDTH = 4
_STEP = 16
"""Sizes of heads are multiples of this."""


def mamba_kind(config: Any) -> MambaKind:
    """Raises ModelUnsupported."""
    for name in ("mamba_d_state", "mamba_d_head"):
        if (size := getattr(config, name)) % _STEP:
            raise ModelUnsupported(
                f"{name} {shown(size)} is no multiple of {_STEP}, which Mamba-2 is served with"
            )
    if config.mamba_n_groups != 1:
        raise ModelUnsupported(f"mamba_n_groups {shown(config.mamba_n_groups)} is not served; 1 is")
    if not 2 <= config.mamba_d_conv <= _MOST_WIDTH:
        raise ModelUnsupported(
            f"mamba_d_conv {shown(config.mamba_d_conv)} is not served; convolutions of states have 2 to {_MOST_WIDTH}"
        )
    low, high = map(float, config.time_step_limit or (0.0, math.inf))
    if not 0 <= low <= high:
        raise ModelUnsupported(f"time_step_limit {shown(config.time_step_limit)} is no range of steps")
    return MambaKind(
        CacheKind(0, 0),
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        num_groups=config.mamba_n_groups,
        state_dim=config.mamba_d_state,
        width=config.mamba_d_conv,
        conv_bias=bool(config.mamba_conv_bias),
        bias=bool(config.mamba_proj_bias),
        # The largest number of float32 in place of none: kept plans are JSON.
        steps=(low, min(high, 3e38)),
    )


def rotates(config: Any) -> bool:
    return bool(config.position_embedding_type == "rope")
