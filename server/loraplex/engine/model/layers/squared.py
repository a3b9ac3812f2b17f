"""A layer's feed-forward without a gate, in the place of a mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import SquaredKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.attention.kernel import AttentionKernel
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.recorded_layers import CosSin


@dataclass(frozen=True, slots=True)
class SquaredWeights:
    up: Linear
    o: Linear


def squared_groups(kind: SquaredKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    return SiteGroup("up", ("up_proj",), hidden, (kind.size,)), SiteGroup(
        "down", ("down_proj",), kind.size, (hidden,)
    )


def read_squared(
    kind: SquaredKind, tensors: LayerTensors, prefix: str, layer: int, up: SiteGroup, down: SiteGroup
) -> SquaredWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    return SquaredWeights(
        tensors.linear(prefix, layer, up, kind.bias), tensors.linear(prefix, layer, down, kind.bias)
    )


def run_squared(
    kind: SquaredKind,
    weights: SquaredWeights,
    x: torch.Tensor,
    cos_sin: Sequence[CosSin],
    batch: ForwardBatch,
    linears: AdaptedLinears,
    kernel: AttentionKernel,
    scaling: object,
) -> torch.Tensor:
    """[T, C] → [T, I], before the output's linear. No other position is read."""
    return linears.squared_relu(linears.apply(weights.up, x, batch))
