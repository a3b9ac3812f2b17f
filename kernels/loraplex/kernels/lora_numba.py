"""Batched LoRA on a CPU: both products of a few rows of one adapter in one go, compiled by numba.

    h[t, :]       = x[t] · A_{a,i}ᵀ                        float32, for the rows of a tile and one site
    y[t, cols_i] += h[t, :] · B_{a,i}                      and g, c where a site has them

A tile is up to ROWS adjacent rows of one adapter: each weight is read once for all of them. Pairs of a tile and a site
are units of work, which threads take as they get done with others; nobody adds to what another writes, and every sum
has one order. So what a row gets depends neither on the threads nor on the other rows, to the bit. Where tiles lie is
read from the adapters' tables as they are: a step prepares nothing but its list of tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from loraplex.kernels.groups import SiteGroup
from loraplex.kernels.lora_numba_tiles import ROWS, expand, shrink
from loraplex.kernels.lora_types import CHUNK, GRANULE_BYTES, LoraWeights, Scratch, Segment
from loraplex.kernels.numba_vectors import (
    JIT,
    LIKE,
    fetch_add,
    size_of,
    use_torch_threads,
)

SMALL = 1 << 16
"""Weights that one thread is done with before it has woken another."""

_ROWS, _CHUNK, _GRANULE_BYTES = ROWS, CHUNK, GRANULE_BYTES


@dataclass(frozen=True, slots=True)
class _Group:
    """`active` [layers]: whether an adapter of the step has a site there. `bounds` [sites + 1] int64: where each
    site's columns of y begin."""

    x_shape: tuple[int, int]
    y_shape: tuple[int, int]
    active: list[bool]
    threads: int
    first_site: int
    bounds: NDArray[np.int64]


class NumbaLoraPass:
    """See `loraplex.kernels.lora.LoraPass`. The weights are of a dtype of `numba_vectors.LIKE`; the tables are
    contiguous, or ValueError is raised."""

    def __init__(
        self,
        weights: LoraWeights,
        scratch: Scratch,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        if not (weights.tables.flags.c_contiguous and weights.vectors.flags.c_contiguous):
            raise ValueError("the tables of an arena are contiguous")
        self._weights = weights
        self._scratch = scratch
        self._like = LIKE[weights.storage.dtype]
        self._storage = weights.storage.data_ptr()
        self._tiles = _tiles(by_slot)
        threads = use_torch_threads()
        # [layers, sites]
        active: NDArray[np.bool_] = np.logical_or.reduce(weights.present[list(by_slot)], axis=0)
        self._groups: dict[str, _Group] = {}
        ranks = CHUNK * int(weights.num_chunks[self._tiles[:, 2]].sum())
        first = 0
        for group in weights.groups:
            sites = slice(first, first + len(group.sites))
            bounds = np.cumsum((0, *group.out_features), dtype=np.int64)
            small = ranks * (len(group.sites) * group.in_features + int(bounds[-1])) <= SMALL
            self._groups[group.key] = _Group(
                (num_rows, group.in_features),
                (num_rows, int(bounds[-1])),
                np.logical_or.reduce(active[:, sites], axis=1).tolist(),
                1 if small else min(threads, len(self._tiles) * len(group.sites)),
                first,
                bounds,
            )
            first += len(group.sites)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `LoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        found = self._groups[group]
        if not found.active[layer]:
            return
        if x.shape != found.x_shape or y.shape != found.y_shape:
            raise ValueError(
                f"group {group!r} of a pass over {found.x_shape[0]} rows got x {tuple(x.shape)}, "
                f"y {tuple(y.shape)}"
            )
        self._run(found, found.threads, layer, x, y)

    def _run(self, found: _Group, threads: int, layer: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if x.stride(1) != 1 or x.dtype not in LIKE:
            x = self._copy("x", x)
        out = y
        if y.stride(1) != 1 or y.dtype not in LIKE:
            out = self._copy("y", y)
        weights = self._weights
        arguments = (
            LIKE[x.dtype],
            LIKE[out.dtype],
            self._like,
            x.data_ptr(),
            x.stride(0),
            found.x_shape[1],
            out.data_ptr(),
            out.stride(0),
            self._storage,
            weights.tables,
            weights.vectors,
            self._tiles,
            layer,
            found.first_site,
            found.bounds,
        )
        if threads == 1:
            _alone(*arguments)
        else:
            _together(threads, *arguments)
        if out is not y:
            y.copy_(out)

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if tensor.dtype in LIKE else torch.float32
        return self._scratch.take(name, tuple(tensor.shape), dtype).copy_(tensor)


def warm_up(weights: torch.dtype, activations: torch.dtype) -> None:
    """Compile, or take from the disk what was compiled before, for storage and for inputs and outputs of these dtypes.
    Without it the first step does, which takes seconds."""
    site = SiteGroup("one", ("one",), 1, (1,))
    storage = torch.zeros(2 * GRANULE_BYTES // weights.itemsize * CHUNK, dtype=weights)
    tables = np.zeros((1, 2, 1, 1, 2), np.int32)
    tables[0, 0] = 1
    one = np.ones(1, np.int32)
    arena = LoraWeights(
        storage, (site,), tables, one, np.ones((1, 1, 1), np.bool_), np.zeros((1, 1, 1), np.int32)
    )
    x, y = torch.zeros(1, 1, dtype=activations), torch.zeros(1, 1, dtype=activations)
    lora = NumbaLoraPass(arena, Scratch(x.device), {0: [(0, 0, 1)]}, 1)
    for threads in (1, 2):
        lora._run(lora._groups["one"], threads, 0, x, y)


def _tiles(by_slot: Mapping[int, Sequence[Segment]]) -> NDArray[np.int64]:
    """[n, 3]: first row, rows, slot."""
    found = [
        (row, min(ROWS, first + count - row), slot)
        for slot, segments in by_slot.items()
        for _, first, count in segments
        for row in range(first, first + count, ROWS)
    ]
    return np.array(found, np.int64).reshape(-1, 3)


@njit(**JIT)
def _take_units(
    taken,
    x_like,
    y_like,
    like,
    x,
    x_stride,
    columns,
    y,
    y_stride,
    storage,
    tables,
    vectors,
    tiles,
    layer,
    first_site,
    bounds,
):
    """Units until there are no more; `taken` is the address of how many there were, for all threads. x, y and storage
    are addresses, strides are in elements; the rest is as in LoraWeights, `_Group` and `_tiles`."""
    num_tiles = len(tiles)
    total_units = num_tiles * (len(bounds) - 1)
    x_row, y_row = x_stride * size_of(x_like), y_stride * size_of(y_like)
    max_chunks = tables.shape[1] - 1
    hidden = np.empty((_ROWS, max_chunks * _CHUNK), np.float32)
    b_tiles = np.empty(max_chunks, np.int64)
    while True:
        # Site by site: what tiles of one adapter have in common stays in the cache.
        unit = fetch_add(taken, 1)
        if unit >= total_units:
            break
        site = unit // num_tiles
        first, rows, slot = tiles[unit % num_tiles]
        inputs = x + first * x_row
        chunk = 0
        while chunk < max_chunks and tables[slot, chunk, layer, first_site + site, 0]:
            a, b = tables[slot, chunk, layer, first_site + site]
            a_tile = storage + np.int64(a) * _GRANULE_BYTES
            shrink(rows, inputs, x_row, columns, a_tile, hidden, chunk * _CHUNK, x_like, like)
            b_tiles[chunk] = storage + np.int64(b) * _GRANULE_BYTES
            chunk += 1
        if chunk:
            begin, end = bounds[site], bounds[site + 1]
            moved = np.int64(vectors[slot, layer, first_site + site]) * _GRANULE_BYTES
            expand(
                rows,
                hidden,
                b_tiles,
                chunk,
                end - begin,
                storage + moved if moved else 0,
                y + first * y_row + begin * size_of(y_like),
                y_row,
                y_like,
                like,
            )


@njit(**JIT)
def _alone(
    x_like,
    y_like,
    like,
    x,
    x_stride,
    columns,
    y,
    y_stride,
    storage,
    tables,
    vectors,
    tiles,
    layer,
    first_site,
    bounds,
):
    taken = np.zeros(1, np.int64)
    _take_units(
        taken.ctypes.data,
        x_like,
        y_like,
        like,
        x,
        x_stride,
        columns,
        y,
        y_stride,
        storage,
        tables,
        vectors,
        tiles,
        layer,
        first_site,
        bounds,
    )


@njit(parallel=True, **JIT)
def _together(
    threads,
    x_like,
    y_like,
    like,
    x,
    x_stride,
    columns,
    y,
    y_stride,
    storage,
    tables,
    vectors,
    tiles,
    layer,
    first_site,
    bounds,
):
    taken = np.zeros(1, np.int64)
    for _ in prange(threads):
        _take_units(
            taken.ctypes.data,
            x_like,
            y_like,
            like,
            x,
            x_stride,
            columns,
            y,
            y_stride,
            storage,
            tables,
            vectors,
            tiles,
            layer,
            first_site,
            bounds,
        )
