"""Types that the implementations of batched LoRA share: the units of the layout, and the inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.site_groups import SiteGroup

CHUNK = 8
"""Ranks in a tile."""
GRANULE_BYTES = 64
"""Tiles begin at multiples of this (a cache line); tables count in it."""

Segment = tuple[int, int, int]
"""(slot, first_row, num_rows): adjacent rows that use the adapter in a slot; slot -1 is the base model."""


def segments_by_slot(
    segments: Sequence[Segment], num_chunks: NDArray[np.int32], num_rows: int
) -> dict[int, list[Segment]]:
    """A step's segments with adapters, by slot, each slot's in the order of their rows. `num_chunks` as in
    LoraWeights. Raises ValueError for a segment outside the rows, an overlap, or an empty slot."""
    found: dict[int, list[Segment]] = {}
    covered = 0
    for slot, first, count in sorted(segments, key=lambda segment: segment[1]):
        if count < 1 or first < covered or first + count > num_rows:
            raise ValueError(
                f"rows {first} … {first + count - 1} overlap others or exceed the {num_rows} of the step"
            )
        covered = first + count
        if slot >= 0:
            if slot >= len(num_chunks) or not num_chunks[slot]:
                raise ValueError(f"slot {slot} holds no adapter")
            found.setdefault(slot, []).append((slot, first, count))
    return found


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Where the tiles of every adapter lie that a step may use.

    `storage` is flat, in the dtype of the tiles. `tables` [slots, max_chunks + 1, layers, sites, 2] int32 holds the
    offsets, in granules, of the A tile (0) and the B tile (1) of a chunk; sites are numbered through the groups in
    their order. Offset 0 is for chunks that an adapter does not have, for example the last of the table: the storage
    begins with zeros, at least as many as the largest tile has elements. `num_chunks` [slots] int32 is the largest
    number of chunks of any site, 0 for an empty slot. `present` [slots, layers, sites] says which sites an adapter
    has. `vectors` [slots, layers, sites] int32 is the offset, in granules, of a site's vector tile [2, N_i], float32
    whatever the other tiles are: g - 1 and c of `loraplex.kernels.lora.dispatch`; 0 where a site has none.

    All but `storage` are on the host. Nothing may write to a slot while a step that uses it is in flight.
    Everything in tiles is finite.
    """

    storage: torch.Tensor
    groups: tuple[SiteGroup, ...]
    tables: NDArray[np.int32]
    num_chunks: NDArray[np.int32]
    present: NDArray[np.bool_]
    vectors: NDArray[np.int32]


class Scratch:
    """Memory that one pass after the other computes in, so that no layer of no step allocates any. It grows to the
    largest operand ever needed. Passes that share it must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory. What was taken by the same name and dtype before is overwritten."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # else it could not be used outside of that mode
                buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)


class LoraPass(Protocol):
    """One step's batch, prepared: which rows use which tiles."""

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the batch's updates for one group of one layer to `y`, in place.

        x is [T, K], y [T, sum of N_i] (columns contiguous), each in any floating dtype. The sums are made in
        float32 and rounded once, into y. The same batch gives the same bits. How many operations this takes
        depends on neither the number of adapters nor how the rows are dealt out among them; where no adapter of
        the batch has a site of the group in this layer, it takes none, and vectors cost only where one has them.
        """
        ...
