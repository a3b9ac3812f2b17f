"""Batched LoRA with torch operations alone: the reference implementation, and the one for CPU.

Per group of a layer, with L = blocks·height lanes and W = width chunks a block (see `lora.packing`):

    X [blocks, height, K]          = x[lane_row]
    A [blocks, S·W·CHUNK, K]       = storage at the A tiles of the blocks' chunks, site by site
    H [blocks, height, S·W·CHUNK]  = X · Aᵀ, zero where the chunk is not the lane's own adapter's
    for each site i:
        D [L + 1, N_i]             = H_i [blocks, height, W·CHUNK] · B_i [blocks, W·CHUNK, N_i], and a row of zeros
        U [T, N_i]                 = D[row_lane]
        U[v]                      += (g - 1)[owner_v] ⊙ y[v, cols_i] + c[owner_v]     rows v whose adapter has vectors
        y[:, cols_i]              += U

Tiles are gathered with one `index_select` over a view of the storage whose rows overlap: row g begins at granule g
and is as long as the tile. Everything is computed in float32. Nothing is summed across blocks, so no order of
summation depends on threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.packing import Packing, pack_rows
from loraplex.kernels.lora.site_groups import SiteGroup
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES, LoraWeights, Scratch, Segment

MAX_GATHER_BYTES = 64 << 20
"""A float32 operand larger than this is gathered and used in parts, by blocks."""


@dataclass(frozen=True, slots=True)
class _Site:
    """One site of a group that some adapter of the batch has. `b` [layers][blocks·W] are its B tiles, `vectors`
    [layers][adapters with vectors] its vector tiles, `moved` [layers] whether there are any."""

    start: int
    end: int
    b: torch.Tensor
    vectors: torch.Tensor | None
    moved: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """`a` [layers][blocks·S·W] are the A tiles of the group's sites. `active` [layers]: whether there are any."""

    in_features: int
    a: torch.Tensor
    sites: tuple[_Site, ...]
    active: tuple[bool, ...]


class TorchLoraPass:
    """See `loraplex.kernels.lora.dispatch.LoraPass`. One step's index tensors, moved to the device in one transfer."""

    def __init__(
        self,
        weights: LoraWeights,
        scratch: Scratch,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        packing = pack_rows(by_slot, weights.num_chunks, num_rows)
        self._storage = weights.storage
        self._floats = weights.storage.view(torch.float32)
        self._num_rows = num_rows
        self._blocks, self._height, self._width = packing.num_blocks, packing.height, packing.width
        self._scratch = scratch
        self._load(weights, by_slot, packing)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `LoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        plan = self._groups[group]
        if plan is None or not plan.active[layer]:
            return
        if x.shape != (self._num_rows, plan.in_features) or y.shape[0] != self._num_rows:
            raise ValueError(
                f"group '{group}' of a pass over {self._num_rows} rows got x {tuple(x.shape)}, y {tuple(y.shape)}"
            )
        height, width, num_sites = self._height, self._width, len(plan.sites)
        ranks = width * CHUNK
        lanes = self._take_rows("lanes", x, self._lane_row).view(self._blocks, height, plan.in_features)
        hidden = self._scratch.buffer("hidden", (self._blocks, height, num_sites, ranks), torch.float32)
        a_tiles = plan.a[layer]
        for first, last in self._parts(num_sites * ranks * plan.in_features):
            chunk = a_tiles[first * num_sites * width : last * num_sites * width]
            a = self._gather(self._storage, chunk, CHUNK * plan.in_features)
            a = a.view(last - first, num_sites * ranks, plan.in_features)
            torch.bmm(
                lanes[first:last],
                a.transpose(1, 2),
                out=hidden[first:last].view(last - first, height, num_sites * ranks),
            )
        hidden.masked_fill_(self._foreign, 0.0)
        for index, site in enumerate(plan.sites):
            features = site.end - site.start
            out = self._scratch.buffer("out", (self._blocks * height + 1, features), torch.float32)
            out[-1].zero_()
            for first, last in self._parts(ranks * features):
                chunk = site.b[layer, first * width : last * width]
                b = self._gather(self._storage, chunk, CHUNK * features)
                torch.bmm(
                    hidden[first:last, :, index],
                    b.view(last - first, ranks, features),
                    out=out[first * height : last * height].view(last - first, height, features),
                )
            update = self._take_rows("update", out, self._row_lane)
            if site.vectors is not None and site.moved[layer]:
                self._add_vectors(update, y[:, site.start : site.end], site.vectors[layer])
            self._add(y[:, site.start : site.end], update)

    def _add_vectors(self, update: torch.Tensor, y: torch.Tensor, tiles: torch.Tensor) -> None:
        """update += (g - 1) ⊙ y + c, in the rows whose adapters have vectors. y is what the base computed."""
        features = y.shape[1]
        vectors = self._gather(self._floats, tiles, 2 * features)
        # A row is in the list once, so that no two terms are added to one place.
        step = max(1, MAX_GATHER_BYTES // (8 * features))
        for first in range(0, self._vector_rows.shape[0], step):
            rows = self._vector_rows[first : first + step]
            own = self._take_rows("vectors", vectors, self._vector_owner[first : first + step])
            moved = self._take_rows("moved", y, rows)
            update.index_add_(0, rows, moved.mul_(own[:, :features]).add_(own[:, features:]))

    def _gather(self, storage: torch.Tensor, tiles: torch.Tensor, size: int) -> torch.Tensor:
        """[n] offsets in granules → [n, size] float32."""
        granule = GRANULE_BYTES // storage.element_size()
        count = (storage.numel() - size) // granule + 1
        return self._take_rows("tiles", storage.as_strided((count, size), (granule, 1)), tiles)

    def _take_rows(self, name: str, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """source[rows] in float32."""
        shape = (rows.shape[0], source.shape[1])
        found = self._scratch.buffer(name, shape, source.dtype)
        torch.index_select(source, 0, rows, out=found)
        return (
            found
            if source.dtype == torch.float32
            else self._scratch.buffer(name, shape, torch.float32).copy_(found)
        )

    def _add(self, y: torch.Tensor, update: torch.Tensor) -> None:
        """y += update, in float32; what y.add_(update) does, without allocating anything."""
        if y.dtype == torch.float32:
            y.add_(update)
        else:
            y.copy_(self._scratch.buffer("y", tuple(y.shape), torch.float32).copy_(y).add_(update))

    def _parts(self, elements: int) -> list[tuple[int, int]]:
        """Ranges of blocks, of `elements` float32 values each, that stay below MAX_GATHER_BYTES."""
        step = max(1, MAX_GATHER_BYTES // (4 * elements))
        return [(first, min(first + step, self._blocks)) for first in range(0, self._blocks, step)]

    def _load(self, weights: LoraWeights, by_slot: Mapping[int, Sequence[Segment]], packing: Packing) -> None:
        """Look up every tile of the batch and move all indices to the device together."""
        slots = list(by_slot)
        # [blocks, W, layers, sites, 2]; unused places have chunk -1, which no adapter has.
        tiles = weights.tables[packing.chunk_slot, packing.chunk_index]
        present: NDArray[np.bool_] = np.logical_or.reduce(weights.present[slots], axis=0)  # [layers, sites]
        vectors: NDArray[np.int32] = weights.vectors[[slot for slot in slots if weights.vectors[slot].any()]]
        arrays = [packing.lane_row, packing.row_lane, packing.lane_owner, packing.chunk_owner]
        arrays += _rows_with_vectors(by_slot, weights.vectors)
        shapes = [array.shape for array in arrays]
        plans: list[tuple[SiteGroup, list[int], int]] = []
        first = 0
        for group in weights.groups:
            last = first + len(group.sites)
            sites = [site for site in range(first, last) if present[:, site].any()]
            if sites:
                # A: block, site, chunk within a layer, so that a block's rows of A are adjacent; B: block, chunk.
                arrays.append(tiles[:, :, :, sites, 0].transpose(2, 0, 3, 1))
                shapes.append((tiles.shape[2], packing.num_blocks * len(sites) * packing.width))
                for site in sites:
                    arrays.append(tiles[:, :, :, site, 1].transpose(2, 0, 1))
                    shapes.append((tiles.shape[2], packing.num_blocks * packing.width))
                    if vectors[:, :, site].any():
                        arrays.append(vectors[:, :, site].T)
                        shapes.append(arrays[-1].shape)
            plans.append((group, sites, first))
            first = last
        views = iter(_transfer(arrays, shapes, self._storage.device))
        self._lane_row, self._row_lane = next(views), next(views)
        lane_owner, chunk_owner = next(views), next(views)
        self._vector_rows, self._vector_owner = next(views), next(views)
        foreign = lane_owner[:, :, None] != chunk_owner[:, None, :]
        # [blocks, height, 1, W·CHUNK]
        self._foreign = foreign.repeat_interleave(CHUNK, dim=2)[:, :, None, :]
        self._groups: dict[str, _Group | None] = {}
        for group, sites, first in plans:
            if not sites:
                self._groups[group.key] = None
                continue
            a = next(views)
            bounds = np.cumsum((0, *group.out_features))
            self._groups[group.key] = _Group(
                in_features=group.in_features,
                a=a,
                sites=tuple(
                    _Site(
                        start=int(bounds[s - first]),
                        end=int(bounds[s - first + 1]),
                        b=next(views),
                        vectors=next(views) if vectors[:, :, s].any() else None,
                        moved=tuple(bool(row.any()) for row in vectors[:, :, s].T),
                    )
                    for s in sites
                ),
                active=tuple(bool(row.any()) for row in present[:, sites]),
            )


def _rows_with_vectors(
    by_slot: Mapping[int, Sequence[Segment]], vectors: NDArray[np.int32]
) -> list[NDArray[np.int32]]:
    """Every row [n] whose adapter has vectors at any site, and the number [n] of its adapter among those."""
    rows: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
    owners = [np.empty(0, np.int32)]
    having = [segments for slot, segments in by_slot.items() if vectors[slot].any()]
    for owner, segments in enumerate(having):
        for _, first, count in segments:
            rows.append(np.arange(first, first + count, dtype=np.int32))
            owners.append(np.full(count, owner, np.int32))
    return [np.concatenate(rows), np.concatenate(owners)]


def _transfer(
    arrays: Sequence[NDArray[np.int32]], shapes: Sequence[tuple[int, ...]], device: torch.device
) -> list[torch.Tensor]:
    """Copy int32 arrays to the device behind each other, in one transfer; views of the given shapes."""
    flat = torch.empty(
        sum(array.size for array in arrays), dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    host = flat.numpy()
    start = 0
    for array in arrays:
        np.copyto(host[start : start + array.size].reshape(array.shape), array)
        start += array.size
    moved = flat.to(device, non_blocking=True)
    views = []
    start = 0
    for array, shape in zip(arrays, shapes, strict=True):
        views.append(moved[start : start + array.size].view(shape))
        start += array.size
    return views
