"""The feed-forwards of layers, by their kinds: how each is named, read and computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from loraplex.engine.model.layer_kinds import FeedForwardKind, GatedKind, MixtureKind
from loraplex.engine.model.layers.gated import GatedWeights, gated_groups, read_gated, run_gated
from loraplex.engine.model.layers.mixture import mixture_groups, read_mixture, run_mixture
from loraplex.engine.model.layers.tensors import LayerTensors
from loraplex.kernels.lora.site_groups import SiteGroup


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Functions of a kind; what they have beside it is as `run_mixture` and `read_mixture` have it."""

    groups: Callable[[Any, int], tuple[SiteGroup, ...]]
    read: Callable[..., Any]
    run: Callable[..., torch.Tensor]


def _read_gated(
    kind: GatedKind, tensors: LayerTensors, prefix: str, module: str, *others: Any
) -> GatedWeights:
    return read_gated(kind, tensors, f"{prefix}{module}.", *others)


FEED_FORWARDS: Mapping[type[FeedForwardKind], FeedForward] = {
    GatedKind: FeedForward(gated_groups, _read_gated, lambda *given: run_gated(*given[:-1])),
    MixtureKind: FeedForward(mixture_groups, read_mixture, run_mixture),
}
