"""The mixers of layers, by their kinds: how each is named, read and computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.kv.layers import CacheKind
from loraplex.engine.model.layer_kinds import (
    AttentionKind,
    DeltaKind,
    MambaKind,
    MixerKind,
    ShortConvKind,
    SquaredKind,
)
from loraplex.engine.model.layers.attention import attend, attention_groups, read_attention
from loraplex.engine.model.layers.delta_net import delta_groups, read_delta
from loraplex.engine.model.layers.mamba import mamba_groups, read_mamba
from loraplex.engine.model.layers.recurrent import recurrent_cache, run_recurrent
from loraplex.engine.model.layers.short_conv import convolve, read_short_conv, short_conv_groups
from loraplex.engine.model.layers.squared import read_squared, run_squared, squared_groups
from loraplex.kernels.lora.site_groups import SiteGroup


@dataclass(frozen=True, slots=True)
class Mixer:
    """Functions of a kind; what they have beside it is as `attend` and `read_attention` have it."""

    name: str
    """The name of its module in a layer."""
    groups: Callable[[Any, int], tuple[SiteGroup, ...]]
    """The linears that read the layer's input, and last that of its output."""
    read: Callable[..., Any]
    """Reads a mixer's weights, below the module's prefix; their `o` is the output's linear."""
    run: Callable[..., torch.Tensor]
    cache: Callable[[Any, torch.dtype], CacheKind] = lambda kind, dtype: kind.cache
    """Makes the cache of a model of a dtype."""


MIXERS: Mapping[type[MixerKind], Mixer] = {
    AttentionKind: Mixer("self_attn", attention_groups, read_attention, attend),
    ShortConvKind: Mixer("conv", short_conv_groups, read_short_conv, convolve),
    DeltaKind: Mixer("linear_attn", delta_groups, read_delta, run_recurrent, recurrent_cache),
    MambaKind: Mixer("mamba", mamba_groups, read_mamba, run_recurrent, recurrent_cache),
    SquaredKind: Mixer("mlp", squared_groups, read_squared, run_squared),
}
