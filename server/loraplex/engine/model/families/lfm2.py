"""The parts of the configs of LFM2 and LFM3 that no other family has."""

from __future__ import annotations

from typing import Any

from loraplex.adapters.store.files import shown
from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.base import ModelUnsupported
from loraplex.engine.model.layer_kinds import ModuleNames, ShortConvKind

FIELDS = frozenset(
    {
        "conv_bias", "conv_L_cache", "full_attn_idxs", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier",
        "block_multiple_of", "tie_embedding", "block_ff_dim",
    }
)  # fmt: skip
"""Config fields beside those that other families have too."""
NAMES = ModuleNames(
    "operator_norm",
    "feed_forward",
    "ffn_norm",
    "embedding_norm",
    ("post_operator_norm", "ffn_norm", "post_ffn_norm"),
)
_MOST_WIDTH = 64
"""Rows of a short convolution."""


def short_conv_kind(config: Any) -> ShortConvKind:
    """Raises ModelUnsupported."""
    width, hidden = config.conv_L_cache, config.hidden_size
    if type(width) is not int or not 1 < width <= _MOST_WIDTH or hidden % 2:
        raise ModelUnsupported(
            f"a short convolution of {shown(width)} rows of {hidden} numbers is not served; "
            f"rows are 2 to {_MOST_WIDTH}, and numbers even"
        )
    return ShortConvKind(CacheKind(1, hidden // 2, width), width, bool(config.conv_bias))


def feed_forward_size(config: Any) -> int:
    """Raises ModelUnsupported."""
    size: int = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        unit, factor = config.block_multiple_of, config.block_ffn_dim_multiplier
        size = int(2 * size / 3)
        if factor is not None:
            if not 0 < factor * size < 1 << 24:
                raise ModelUnsupported(
                    f"block_ffn_dim_multiplier {shown(factor)} and block_multiple_of {shown(unit)} give no width"
                )
            size = -(-int(factor * size) // unit) * unit
    return size
