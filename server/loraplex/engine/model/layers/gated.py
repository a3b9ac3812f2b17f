"""A layer's gated feed-forward: packed gate and up, the activation, down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loraplex.engine.model.base import ForwardBatch
from loraplex.engine.model.layer_kinds import GatedKind
from loraplex.engine.model.layers.adapted_linears import AdaptedLinears, Linear
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.lora.site_groups import SiteGroup


@dataclass(frozen=True, slots=True)
class GatedWeights:
    """Gate and up are one linear."""

    gate_up: Linear
    down: Linear


def gated_groups(kind: GatedKind, hidden: int) -> tuple[SiteGroup, SiteGroup]:
    """Gate and up, and down."""
    *gate_and_up, down = kind.sites
    sizes = (kind.size, kind.size) if len(gate_and_up) == 2 else (2 * kind.size,)
    gate_up = SiteGroup("gate_up", tuple(gate_and_up), hidden, sizes)
    return gate_up, SiteGroup("down", (down,), kind.size, (hidden,))


def read_gated(
    kind: GatedKind, tensors: LayerTensors, prefix: str, layer: int, gate_up: SiteGroup, down: SiteGroup
) -> GatedWeights:
    """Raises ModelUnsupported for tensors that do not fit."""
    return GatedWeights(
        gate_up=tensors.linear(prefix, layer, gate_up, kind.bias),
        down=tensors.linear(prefix, layer, down, kind.bias),
    )


def run_gated(
    kind: GatedKind, weights: GatedWeights, x: torch.Tensor, batch: ForwardBatch, linears: AdaptedLinears
) -> torch.Tensor:
    """[T, C]"""
    x = linears.gate(weights.gate_up, x, batch, kind.activation)
    return linears.apply(weights.down, x, batch)
