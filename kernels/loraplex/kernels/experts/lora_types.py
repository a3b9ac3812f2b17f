"""LoRA on the routed experts of a mixture: the weights of all adapters, and a step's pass over them.

For a group of sites (linears that read the same x and write columns of one y), for each place p that `ExpertOps.gather`
made, with the row's adapter a, the place's expert e and each site i that a has for e:

    y[p, cols_i] += (x[p] · A_{a,e,i}ᵀ) · B_{a,e,i}        A [R, K], B [R, N_i] (transposed, scaling folded in)

    P places · K in_features · N_i columns of site i · R the rank of one expert of site i in a

Places of the base model, and sites and experts without tiles, stay as they are. A tile has 1, 2, 4 or 8 ranks, since
the ranks of single experts are small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.experts.types import ExpertRows
from loraplex.kernels.lora.types import Segment, segments_by_slot

TILE_HEIGHTS = (1, 2, 4, 8)
"""Ranks that a tile may have."""


def tile_height(rank: int) -> int:
    """Ranks in each tile of an expert's matrices of this rank: the fewest that hold it, or the most there are."""
    return next(height for height in TILE_HEIGHTS if height >= min(rank, TILE_HEIGHTS[-1]))


@dataclass(frozen=True, slots=True)
class ExpertSiteGroup:
    """Sites of the experts of one layer that read the same input and write columns of one output."""

    key: str
    """"experts.gate_up" or "experts.down"."""
    sites: tuple[str, ...]
    """("gate", "up", "gate_up") or ("down",). An adapter has gate and up each by itself, or both as one matrix."""
    in_features: int
    """K, the columns of x."""
    columns: tuple[tuple[int, int], ...]
    """The first column of y that each site writes, and the one behind its last."""
    num_experts: int
    layers: tuple[int, ...]
    """Those that have it."""

    @property
    def out_features(self) -> int:
        """Columns of y."""
        return max(end for _, end in self.columns)


@dataclass(frozen=True, slots=True)
class ExpertLoraWeights:
    """Where the tiles of every adapter on experts lie that a step may use. All but `storage` are on the host. Nothing
    may write to a slot while a step that uses it is in flight. Everything in tiles is finite."""

    storage: torch.Tensor
    """Flat, in the dtype of the tiles. Tiles begin at multiples of GRANULE_BYTES, an A tile [height, K] and a B tile
    [height, N_i]. Several experts may share a tile."""
    groups: tuple[ExpertSiteGroup, ...]
    slot_of: NDArray[np.int32]
    """[slots of the arena]: which slot of the tables here its adapter has; -1 where it has nothing on experts. By their
    size these tables have fewer slots."""
    tables: NDArray[np.int32]
    """[slots, layers, sites, experts, chunks, 2]: offsets in granules of the A tile (0) and the B tile (1) of a chunk.
    Sites are numbered through the groups in their order. Offset 0 ends an expert's chunks; the last one has it."""
    heights: NDArray[np.int32]
    """[slots, layers, sites]: ranks in a tile, one of TILE_HEIGHTS; 0 where an adapter has nothing."""


class ExpertLoraPass(Protocol):
    """One step's batch, prepared: which rows use which tiles."""

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor, rows: ExpertRows) -> None:
        """Add the batch's updates for one group of one layer to `y` [P, N], in place, from x [P, K] as
        `ExpertOps.gather` made it of these `rows`. Place p has the adapter of row rows.row_of[p], and the expert whose
        places hold p. Columns are contiguous. The sums of a site are made in float32 and rounded once, into y."""
        ...


MakeExpertLoraPass = Callable[[ExpertLoraWeights, Mapping[int, Sequence[Segment]], int], ExpertLoraPass]
"""Prepares a step's adapters on experts: weights, segments by slot of the tables of experts, rows of the step."""


def begin_expert_pass(
    make: MakeExpertLoraPass,
    weights: ExpertLoraWeights,
    segments: Sequence[Segment],
    num_rows: int,
) -> ExpertLoraPass | None:
    """Prepare a step of `num_rows` rows; None if no row has an adapter on experts. `make`: a backend's
    (`Kernels.expert_lora_pass`). Raises ValueError as `segments_on_experts` does."""
    on_experts = segments_on_experts(weights, segments, num_rows)
    return make(weights, on_experts, num_rows) if on_experts else None


def segments_on_experts(
    weights: ExpertLoraWeights, segments: Sequence[Segment], num_rows: int
) -> dict[int, list[Segment]]:
    """Pick the segments of adapters on experts, by slot of the tables of experts. Those of `segments` are the arena's.
    Raises ValueError for a segment outside the rows or the slots, or an overlap."""
    by_slot = segments_by_slot(segments, np.ones(len(weights.slot_of), np.int32), num_rows)
    found = ((int(weights.slot_of[slot]), own) for slot, own in by_slot.items())
    return {slot: own for slot, own in found if slot >= 0}


def slots_of_rows(by_slot: Mapping[int, Sequence[Segment]], num_rows: int) -> NDArray[np.int32]:
    """[num_rows] the slot of each row in the tables of experts, -1 for the base model."""
    slots = np.full(num_rows, -1, np.int32)
    for slot, segments in by_slot.items():
        for _, first, count in segments:
            slots[first : first + count] = slot
    return slots


def sites_of_group(weights: ExpertLoraWeights, key: str) -> tuple[ExpertSiteGroup, int]:
    """A group, and the number of its first site in `tables`. Raises KeyError for no group."""
    first = 0
    for group in weights.groups:
        if group.key == key:
            return group, first
        first += len(group.sites)
    raise KeyError(key)


def check_operands(
    group: ExpertSiteGroup, num_rows: int, x: torch.Tensor, y: torch.Tensor, rows: ExpertRows
) -> None:
    """Raises ValueError where they are not of one step of `num_rows` rows through this group."""
    places = len(rows.row_of)
    if (
        x.shape != (places, group.in_features)
        or y.shape != (places, group.out_features)
        or len(rows.place_of) != num_rows
        or len(rows.starts) != group.num_experts + 1
    ):
        raise ValueError(
            f"group '{group.key}' of a pass over {num_rows} rows got x {list(x.shape)}, y {list(y.shape)} at "
            f"{places} places of {len(rows.starts) - 1} experts"
        )
