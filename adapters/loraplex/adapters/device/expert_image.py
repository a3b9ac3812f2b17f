"""LoRA on routed experts, from a file to the tiles of an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loraplex.adapters.device.elements import Elements, all_finite
from loraplex.adapters.device.expert_tiles import SIDES, ExpertKey, ExpertLayout, Side
from loraplex.adapters.device.placement import ExpertPlacement
from loraplex.adapters.errors import AdapterRefused, ArtifactCorrupt
from loraplex.adapters.spec import AdapterSpec, ExpertWeights, TensorSlice
from loraplex.adapters.store.tensors import scan_tensors


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of the file, which side of the LoRA it has, and the weights that it is of: several where experts share
    it."""

    tensor: TensorSlice
    side: Side
    weights: list[ExpertWeights]

    def by_expert(self, values: NDArray[Any]) -> NDArray[Any]:
        """[experts, rank, features], a view: of the one expert, or of all in their order."""
        of = self.weights[0]
        is_a = (self.side == "a") != of.turned
        if of.expert >= 0:
            return values[None] if is_a else values.T[None]
        if is_a:
            return values.reshape(-1, of.rank, values.shape[1])
        return values.reshape(len(values), of.rank, -1).transpose(2, 1, 0)


def expert_tensors(spec: AdapterSpec) -> dict[int, ExpertTensor]:
    """Keyed by where they begin in the file."""
    found: dict[int, ExpertTensor] = {}
    for weights in spec.experts:
        sides = SIDES[::-1] if weights.turned else SIDES
        for tensor, side in zip((weights.a, weights.b), sides, strict=True):
            found.setdefault(tensor.start, ExpertTensor(tensor, side, [])).weights.append(weights)
    return found


def examine_experts(
    spec: AdapterSpec, tensors_path: Path, layout: ExpertLayout, check_wanted: Callable[[], None]
) -> tuple[ExpertKey, ...]:
    """Read the values on experts for which tiles they need. Holds the first matrix of each site while all others equal
    it. `check_wanted` is called before each matrix. Raises ArtifactCorrupt, OSError, and what `check_wanted` raises."""
    tensors = expert_tensors(spec)
    sites: dict[tuple[int, str], _Site] = {}
    for weights in spec.experts:
        site = sites.setdefault((weights.layer, weights.site), _Site([0] * layout.num_experts))
        site.scalings.add(weights.scaling)
    scanned = scan_tensors(tensors_path, [each.tensor for each in tensors.values()], lambda _: None)
    for tensor, values in scanned:
        check_wanted()
        found = tensors[tensor.start]
        sites[found.weights[0].layer, found.weights[0].site].examine(found, values)
    return tuple(site.key(*place) for place, site in sites.items())


@dataclass(slots=True)
class _Site:
    """A site of the experts of a layer. `ranks` are of experts that have any effect."""

    ranks: list[int]
    scalings: set[float] = field(default_factory=set)
    first: dict[Side, NDArray[Any]] = field(default_factory=dict)
    """The first matrix, as integers with the same bits."""
    differ: set[Side] = field(default_factory=set)

    def examine(self, found: ExpertTensor, values: NDArray[Any]) -> None:
        bits = found.by_expert(values.view(f"u{values.itemsize}"))
        if found.side == "b":
            most = bits.max(axis=(1, 2)).tolist()
            for weights in found.weights:
                numbers = range(len(self.ranks)) if weights.expert < 0 else [weights.expert]
                for expert, largest in zip(numbers, most, strict=True):
                    self.ranks[expert] = weights.rank if largest else 0
        if found.side in self.differ:
            return
        first = self.first.get(found.side)
        if first is None:
            first = self.first[found.side] = bits[0].copy()
        # The second decides almost always, and is one of many.
        if not (_same(first, bits[-1]) and all(_same(first, other) for other in bits)):
            self.differ.add(found.side)
            del self.first[found.side]

    def key(self, layer: int, site: str) -> ExpertKey:
        alike = len({rank for rank in self.ranks if rank}) == 1 and sum(map(bool, self.ranks)) > 1
        one_b = alike and "b" not in self.differ and len(self.scalings) == 1
        return ExpertKey(layer, site, tuple(self.ranks), alike and "a" not in self.differ, one_b)


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


class ExpertWriter:
    """Puts the matrices of an adapter into the tiles of an image: rounded once, B with its scaling."""

    def __init__(self, placement: ExpertPlacement, into: Elements) -> None:
        self._placement = placement
        self._indices = {(key.layer, key.site): index for index, key in enumerate(placement.keys)}
        self._into = into

    def put(self, found: ExpertTensor, values: NDArray[Any]) -> None:
        """`values` as they are in the file, in any dtype."""
        weights, dtype = found.weights[0], self._into.dtype
        if values.dtype != dtype or found.side == "b":
            exact = values.astype(np.float32, copy=False)
            scaled = exact * np.float32(weights.scaling) if found.side == "b" else exact
            values = scaled.astype(dtype, copy=False)
        by_expert = found.by_expert(values.view(f"u{dtype.itemsize}"))
        if weights.in_turns and found.side == "b":
            count, rank, outputs = by_expert.shape
            halves = by_expert.reshape(count, rank, outputs // 2, 2).swapaxes(2, 3)
            by_expert = halves.reshape(count, rank, outputs)
        elif weights.expert < 0:
            # A stack by rank is transposed whole: the columns of an expert lie apart.
            by_expert = np.ascontiguousarray(by_expert)
        index = self._indices[weights.layer, weights.site]
        for expert, matrix in enumerate(by_expert.view(dtype), max(weights.expert, 0)):
            for piece in self._placement.pieces.get((index, found.side, expert), ()):
                part = matrix[piece.rows]
                self._into[piece.elements].reshape(part.shape)[...] = part

    def check_finite(self) -> None:
        """Raises AdapterRefused for the first expert that has another value."""
        for (index, _, expert), pieces in self._placement.pieces.items():
            if not all(all_finite(self._into[piece.elements]) for piece in pieces):
                key = self._placement.keys[index]
                raise AdapterRefused(
                    "non_finite",
                    f"{key.site} of expert {expert} in layer {key.layer} has values that are not finite once they are "
                    f"scaled and in {self._into.dtype}",
                )


def check_experts_fit(spec: AdapterSpec, layout: ExpertLayout | None) -> None:
    """Raises ArtifactCorrupt where the adapter does not fit the model's experts."""
    seen: set[tuple[int, str, int]] = set()
    whole: set[tuple[int, str]] = set()
    for weights in spec.experts:
        where = f"{weights.site} of the experts of layer {weights.layer}"
        shape = None if layout is None else layout.shape(weights.layer, weights.site)
        if layout is None:
            raise AdapterRefused(
                "unsupported_feature",
                "LoRA on the experts of a mixture is served by Loraplex's own decoder, not here",
                feature="experts",
            )
        if shape is None or not -1 <= weights.expert < layout.num_experts:
            raise ArtifactCorrupt(f"{where} is not a place for an adapter in this model")
        place = (weights.layer, weights.site, weights.expert)
        if not seen.isdisjoint({place, (*place[:2], -1)}) or (weights.expert < 0 and place[:2] in whole):
            raise ArtifactCorrupt(f"{where} is there twice")
        seen.add(place)
        whole.add(place[:2])
        most = layout.max_rank * (2 if weights.site == "gate_up" else 1)
        if not 1 <= weights.rank <= most:
            raise ArtifactCorrupt(f"{where} has rank {weights.rank}; this engine serves 1 … {most}")
        if (weights.a.shape, weights.b.shape) != _shapes(weights, shape, layout.num_experts):
            raise ArtifactCorrupt(
                f"{where}: A {list(weights.a.shape)} and B {list(weights.b.shape)} do not fit rank {weights.rank} of "
                f"{layout.num_experts} experts from {shape[0]} to {shape[1]} features"
            )


def _shapes(
    weights: ExpertWeights, shape: tuple[int, int], count: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of A and B in the file."""
    k, n = shape[::-1] if weights.turned else shape
    ranks = weights.rank * (count if weights.expert < 0 else 1)
    return (ranks, k), (n, ranks)
