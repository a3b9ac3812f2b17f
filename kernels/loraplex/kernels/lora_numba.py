"""Batched LoRA on a CPU: both products of a few rows of one adapter in one go, compiled by numba.

    h[t, :]       = x[t] · A_{a,i}ᵀ                        float32, for the rows of a tile and one site
    y[t, cols_i] += h[t, :] · B_{a,i}                      and g, c where a site has them

A tile is up to ROWS adjacent rows of one adapter: each weight is read once for all of them. Pairs of a tile and a site
are shared out among the threads; nobody adds to what another writes, and every sum has one order, so the same batch
gives the same bits. What a row gets depends on no other. Where tiles lie is read from the adapters' tables as they are:
a step prepares nothing but its list of tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba
import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

from loraplex.kernels.groups import SiteGroup
from loraplex.kernels.lora_types import CHUNK, GRANULE_BYTES, LoraWeights, Scratch, Segment

ROWS = 4
DTYPES = frozenset({torch.bfloat16, torch.float32})
"""Of weights, inputs and outputs that the compiled code reads."""
_CHUNK = CHUNK
# Not nnan, not ninf: what is not finite must stay so, in its own row.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


class NumbaLoraPass:
    """See `loraplex.kernels.lora.LoraPass`. The weights are in one of DTYPES."""

    def __init__(
        self,
        weights: LoraWeights,
        scratch: Scratch,
        by_slot: Mapping[int, Sequence[Segment]],
        num_rows: int,
    ) -> None:
        self._weights = weights
        self._scratch = scratch
        self._num_rows = num_rows
        self._storage = _numbers(weights.storage)
        self._floats = weights.storage.view(torch.float32).numpy()
        self._tiles = _tiles(by_slot)
        self._granule = GRANULE_BYTES // weights.storage.element_size()
        # [layers, sites]
        active: NDArray[np.bool_] = np.logical_or.reduce(weights.present[list(by_slot)], axis=0)
        self._groups: dict[str, tuple[int, int, NDArray[np.int64], NDArray[np.bool_]]] = {}
        first = 0
        for group in weights.groups:
            sites = slice(first, first + len(group.sites))
            bounds = np.cumsum((0, *group.out_features), dtype=np.int64)
            self._groups[group.key] = (
                first,
                group.in_features,
                bounds,
                np.logical_or.reduce(active[:, sites], axis=1),
            )
            first += len(group.sites)

    def apply(self, layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """See `LoraPass.apply`. Raises ValueError where the shapes are not the group's, KeyError for no group."""
        first_site, in_features, bounds, active = self._groups[group]
        if not active[layer]:
            return
        if x.shape != (self._num_rows, in_features) or y.shape != (self._num_rows, bounds[-1]):
            raise ValueError(
                f"group {group!r} of a pass over {self._num_rows} rows got x {tuple(x.shape)}, y {tuple(y.shape)}"
            )
        if x.dtype not in DTYPES or not x.is_contiguous():
            x = self._scratch.take("x", tuple(x.shape), torch.float32).copy_(x)
        out = y
        if y.dtype not in DTYPES or not y.is_contiguous():
            out = self._scratch.take("y", tuple(y.shape), torch.float32).copy_(y)
        numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))
        _apply(
            _numbers(x),
            _numbers(out),
            self._storage,
            self._floats,
            self._weights.tables,
            self._weights.vectors,
            self._tiles,
            layer,
            first_site,
            bounds,
            self._granule,
        )
        if out is not y:
            y.copy_(out)


def warm_up(weights: torch.dtype, activations: torch.dtype) -> None:
    """Compile, or take from the disk what was compiled before, for storage and for inputs and outputs of these dtypes.
    Without it the first step does, which takes seconds."""
    if weights not in DTYPES or activations not in DTYPES:
        return
    site = SiteGroup("one", ("one",), 1, (1,))
    storage = torch.zeros(2 * GRANULE_BYTES // weights.itemsize * CHUNK, dtype=weights)
    tables = np.zeros((1, 2, 1, 1, 2), np.int32)
    tables[0, 0] = 1
    one = np.ones(1, np.int32)
    arena = LoraWeights(
        storage, (site,), tables, one, np.ones((1, 1, 1), np.bool_), np.zeros((1, 1, 1), np.int32)
    )
    x, y = torch.zeros(1, 1, dtype=activations), torch.zeros(1, 1, dtype=activations)
    NumbaLoraPass(arena, Scratch(x.device), {0: [(0, 0, 1)]}, 1).apply(0, "one", x, y)


def _numbers(tensor: torch.Tensor) -> NDArray[np.uint16] | NDArray[np.float32]:
    """Its memory: bfloat16 as the integers that hold its bits."""
    array: NDArray[np.uint16] | NDArray[np.float32] = (
        tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    ).numpy()
    return array


def _tiles(by_slot: Mapping[int, Sequence[Segment]]) -> NDArray[np.int32]:
    """[n, 3]: first row, rows, slot."""
    found = [
        (row, min(ROWS, first + count - row), slot)
        for slot, segments in by_slot.items()
        for _, first, count in segments
        for row in range(first, first + count, ROWS)
    ]
    return np.array(found, np.int32).reshape(-1, 3)


@intrinsic
def _as_float(_context, bits):
    """The float32 with these bits."""

    def build(context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), build


@intrinsic
def _as_bits(_context, number):
    """The bits of a float32."""

    def build(context, builder, _signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), build


def _load(array, index):
    """An element of a flat array as float32."""


def _store(array, index, value):
    """Round a float32, to even, into a flat array."""


@overload(_load, inline="always")
def _overload_load(array, index):
    if array.dtype == types.uint16:
        return lambda array, index: _as_float(np.uint32(array[index]) << np.uint32(16))
    return lambda array, index: array[index]


@overload(_store, inline="always")
def _overload_store(array, index, value):
    if array.dtype == types.float32:

        def keep(array, index, value):
            array[index] = value

        return keep

    def narrow(array, index, value):
        bits = _as_bits(value)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # Rounding would make another number, or an infinity, of a NaN with few digits.
        array[index] = np.uint16(rounded) if value == value else np.uint16(0x7FC0)  # noqa: PLR0124

    return narrow


@njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy")
def _shrink(x, storage, start, columns, rows, hidden, rank):
    """hidden[t, rank + r] = x[t] · tile[r], for the CHUNK ranks of an A tile; x [rows, columns] float32."""
    for r in range(_CHUNK):
        a = storage[start + r * columns : start + (r + 1) * columns]
        if rows == 1:
            x0 = x[0]
            s0 = np.float32(0)
            for k in range(columns):
                s0 += x0[k] * _load(a, k)
            hidden[0, rank + r] = s0
        else:
            # As many rows as there are, or four: reading one twice costs nothing.
            x0, x1, x2, x3 = x[0], x[1], x[min(2, rows - 1)], x[rows - 1]
            s0 = s1 = s2 = s3 = np.float32(0)
            for k in range(columns):
                weight = _load(a, k)
                s0 += x0[k] * weight
                s1 += x1[k] * weight
                s2 += x2[k] * weight
                s3 += x3[k] * weight
            hidden[0, rank + r] = s0
            hidden[1, rank + r] = s1
            hidden[min(2, rows - 1), rank + r] = s2
            hidden[rows - 1, rank + r] = s3


@njit(fastmath=_FAST, nogil=True, cache=True, error_model="numpy")
def _expand(hidden, storage, start, columns, y):
    """y [columns] float32 += hidden [CHUNK] · tile [CHUNK, columns]."""
    b = storage[start : start + _CHUNK * columns]
    h0, h1, h2, h3 = hidden[0], hidden[1], hidden[2], hidden[3]
    h4, h5, h6, h7 = hidden[4], hidden[5], hidden[6], hidden[7]
    for n in range(columns):
        y[n] += (
            h0 * _load(b, n)
            + h1 * _load(b, columns + n)
            + h2 * _load(b, 2 * columns + n)
            + h3 * _load(b, 3 * columns + n)
            + h4 * _load(b, 4 * columns + n)
            + h5 * _load(b, 5 * columns + n)
            + h6 * _load(b, 6 * columns + n)
            + h7 * _load(b, 7 * columns + n)
        )


@njit(parallel=True, fastmath=_FAST, nogil=True, cache=True, error_model="numpy")
def _apply(x, y, storage, floats, tables, vectors, tiles, layer, first_site, bounds, granule):
    num_sites = len(bounds) - 1
    columns = x.shape[1]
    max_chunks = tables.shape[1] - 1
    for unit in prange(len(tiles) * num_sites):
        first, rows, slot = tiles[unit // num_sites]
        site = unit % num_sites
        begin, end = bounds[site], bounds[site + 1]
        width = end - begin
        num_chunks = 0
        while num_chunks < max_chunks and tables[slot, num_chunks, layer, first_site + site, 0]:
            num_chunks += 1
        if not num_chunks:
            continue
        inputs = np.empty((rows, columns), np.float32)
        for t in range(rows):
            source, target = x[first + t], inputs[t]
            for k in range(columns):
                target[k] = _load(source, k)
        hidden = np.empty((rows, num_chunks * _CHUNK), np.float32)
        for chunk in range(num_chunks):
            start = np.int64(tables[slot, chunk, layer, first_site + site, 0]) * granule
            _shrink(inputs, storage, start, columns, rows, hidden, chunk * _CHUNK)
        moved = np.int64(vectors[slot, layer, first_site + site]) * (GRANULE_BYTES // 4)
        sums = np.empty(width, np.float32)
        for t in range(rows):
            row = y[first + t, begin:end]
            for n in range(width):
                sums[n] = _load(row, n)
            if moved:
                for n in range(width):
                    sums[n] += sums[n] * floats[moved + n] + floats[moved + width + n]
            for chunk in range(num_chunks):
                start = np.int64(tables[slot, chunk, layer, first_site + site, 1]) * granule
                _expand(hidden[t, chunk * _CHUNK :], storage, start, width, sums)
            for n in range(width):
                _store(row, n, sums[n])
