"""A layer's gated feed-forward: packed gate and up, the activation, down."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.model.layer_kinds import GatedKind
from loraplex.engine.model.layers.adapted_linears import Linear
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
