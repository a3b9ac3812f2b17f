"""A layer's gated short convolution, whose last rows lie in the paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import ShortConvKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.attention.kernel import AttentionKernel, TellsPrevious
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.recorded_layers import CosSin


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """`weight` [K, C] float32, `bias` [C] float32 or None."""

    gates: Linear
    weight: torch.Tensor
    bias: torch.Tensor | None
    o: Linear


def short_conv_groups(kind: ShortConvKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    """Both gates with the input, and the output."""
    return SiteGroup("in", ("in_proj",), hidden, (3 * hidden,)), SiteGroup(
        "o", ("out_proj",), hidden, (hidden,)
    )


def read_short_conv(
    kind: ShortConvKind, tensors: LayerTensors, prefix: str, layer: int, gates: SiteGroup, o: SiteGroup
) -> ShortConvWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    channels = o.in_features
    weight = tensors.tensor(f"{prefix}conv.weight", channels, 1, kind.width)
    return ShortConvWeights(
        gates=tensors.linear(prefix, layer, gates, kind.bias),
        weight=weight[:, 0].T.float().contiguous(),
        bias=tensors.tensor(f"{prefix}conv.bias", channels).float() if kind.bias else None,
        o=tensors.linear(prefix, layer, o, kind.bias),
    )


def convolve(
    kind: ShortConvKind,
    weights: ShortConvWeights,
    x: torch.Tensor,
    cos_sin: Sequence[CosSin],
    batch: ForwardBatch,
    linears: AdaptedLinears,
    kernel: AttentionKernel,
    scaling: object,
) -> torch.Tensor:
    """[T, C] → [T, C], before the output's linear. There are no queries to scale."""
    assert isinstance(kernel, TellsPrevious)
    layer = weights.gates.layer
    rows = batch.attention_of(layer)
    previous = kernel.previous_slots(rows, kind.width - 1)
    gates = linears.apply(weights.gates, x, batch)
    return linears.short_conv(
        gates, batch.kv.layer(layer), rows.slots, previous, weights.weight, weights.bias
    )
