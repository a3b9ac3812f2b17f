"""Paged attention on a CPU, compiled by numba: decode, prefill with a past and mixes of both in one kernel.

The formula is that of `loraplex.kernels.attention.torch_attention`. A block's memory [16, 2, Hkv, D] has an order of
its own here: for each KV head K and then V, each as 8·D pairs of elements that vectors are made of (see
`key_value_offsets`). A unit of work is a tile of rows of one sequence, a KV head, and the spans of its positions;
threads take the next unit when they finish one. Where a sequence has few tiles, each span is a unit of its own, and the
thread that finishes the last one joins them in their order, as one that computes them one after the other does.

A row's result has the same bits for any threads, any other sequences of the step, any other rows of its own sequence
that the step computes, and any blocks (see `numba_attention_tiles`).

Positions at or beyond the end of a sequence, and those before the window of a tile's first row, have no influence,
whatever they hold.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.attention.kv_codes import SCALE_BYTES, has_whole_blocks, head_width
from loraplex.kernels.attention.numba_attention_amx import tile_shapes
from loraplex.kernels.attention.numba_attention_products import BLOCK, SEGMENT
from loraplex.kernels.attention.numba_attention_tiles import attend, copy_vector, finish, join_spans
from loraplex.kernels.numba_runtime.amx import release_tiles
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    CODES,
    LIKE,
    fetch_add,
    jit,
    load_some,
    read_float64,
    read_int64,
    size_of,
    store_some,
)

SPAN = 512
"""Positions whose part of an answer is computed by itself, a multiple of SEGMENT. Spans begin at multiples of it."""

_ENOUGH_TILES = 4
"""Tiles of a sequence from which on a unit has all of its spans: then there are units enough for the threads."""

_MAX_VECTORS = 48
"""Query vectors of a tile, unless one row has more."""

_TILE_NUMBERS = 8
_F32 = np.float32(0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The units of layers with one window and one number of query heads for a KV head.

    `tiles` [n, 8] int64: begin of the block table in `tables`, first row, rows, position of the first row, first and
    end of the positions seen, number of units, first query vector in `partials`. `units` [m, 2] int64: tile, and the
    number of the span among those of the tile, -1 for all of them. `done` [n·Hkv] int64: units finished, zeros between
    calls.
    """

    tiles: NDArray[np.int64]
    units: NDArray[np.int64]
    done: NDArray[np.int64]
    partials: NDArray[np.float32]
    addresses: tuple[int, ...]
    """Addresses as `_attend_units` takes them: of the block tables, of tiles, of units and how many, of `done`, of
    `partials` and bytes of a KV head's."""


class AttentionStep(Protocol):
    """The part of a step that `paged_attention` takes: a `NumbaAttentionBatch`, or a replacement for it."""

    @property
    def num_rows(self) -> int: ...

    def lists(self, kv_heads: int, group: int, dim: int, window: int) -> tuple[int, ...]:
        """`_Plan.addresses` for layers with these sizes."""
        ...


@dataclass(frozen=True, slots=True)
class NumbaAttentionBatch:
    """A step's sequences, laid out once for all layers. `slots` [T] int64: where each row's K and V go, 16·block +
    offset. For one thread at a time."""

    num_rows: int
    slots: torch.Tensor
    counts: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    starts: NDArray[np.int64]
    tables: NDArray[np.int32]
    tables_address: int
    plans: dict[tuple[int, int, int, int], _Plan] = field(default_factory=dict, repr=False)
    previous: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    """The slots of that many positions before each row."""

    def lists(self, kv_heads: int, group: int, dim: int, window: int) -> tuple[int, ...]:
        """See `AttentionStep`."""
        key = (kv_heads, group, dim, window)
        made = self.plans.get(key)
        if made is None:
            tiles, units, vectors = _lay_out(self.counts, self.seq_lens, self.starts, group, window)
            done = np.zeros(len(tiles) * kv_heads, np.int64)
            partials = np.empty(vectors * kv_heads * (dim + 2), np.float32)
            of_tiles, of_units, of_done = (array.ctypes.data for array in (tiles, units, done))
            addresses = (
                self.tables_address,
                of_tiles,
                of_units,
                len(units),
                of_done,
                partials.ctypes.data,
                vectors * (dim + 2) * 4,
            )
            made = self.plans[key] = _Plan(tiles, units, done, partials, addresses)
        return made.addresses


def build_attention_batch(
    num_rows: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    *,
    block_size: int = BLOCK,
) -> NumbaAttentionBatch:
    """Lay out a step: sequence i has the next num_rows[i] rows of the flat batch, seq_lens[i] positions at its end
    (those rows included) and the blocks block_tables[i]. Raises ValueError where a table is too short, or blocks have
    not 16 positions."""
    if block_size != BLOCK:
        raise ValueError(f"these kernels are made for blocks of {BLOCK} positions, not {block_size}")
    tables = array("i")
    starts = []
    for count, length, table in zip(num_rows, seq_lens, block_tables, strict=True):
        needed = -(-length // BLOCK)
        if not 1 <= count <= length or len(table) < needed:
            raise ValueError(f"{count} rows of {length} positions do not fit a table of {len(table)} blocks")
        starts.append(len(tables))
        tables.extend(table[:needed])
    counts = np.array(num_rows, np.int64)
    lengths = np.array(seq_lens, np.int64)
    flat = np.array(tables, np.int32)
    begins = np.array(starts, np.int64)
    slots = _slots(counts, lengths, begins, flat)
    return NumbaAttentionBatch(
        len(slots), torch.from_numpy(slots), counts, lengths, begins, flat, flat.ctypes.data
    )


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionStep,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`loraplex.kernels.attention.torch_attention.paged_attention`, after `layers.numba_rope.rotate_and_write` of the
    same step.

    q: [T, Hq, D], D even, last axis contiguous; cache: [N, 16, 2, Hkv, D], each block contiguous; one dtype of
    `numba_runtime.vectors.LIKE`; or [N, 16, 2, Hkv, D + 2] of codes; sinks: [Hq] float32, contiguous, or None. Returns
    [T, Hq, D] in that dtype, contiguous. Raises ValueError for other shapes.
    """
    rows, heads, dim = q.shape
    kv_heads = cache.shape[3]
    if (
        cache.dtype not in (q.dtype, torch.int8)
        or cache.shape[1:3] != (BLOCK, 2)
        or cache.shape[4] != head_width(dim, cache.dtype)
        or dim % 2
        or heads % kv_heads
        or rows != batch.num_rows
        or q.stride(2) != 1
        or not has_whole_blocks(cache)
        or not (sinks is None or (sinks.shape == (heads,) and sinks.dtype is torch.float32))
    ):
        raise ValueError(
            f"queries {list(q.shape)} {q.dtype} of {batch.num_rows} rows do not fit a cache "
            f"{list(cache.shape)} {cache.dtype}"
        )
    out = torch.empty(q.shape, dtype=q.dtype)
    lists = batch.lists(kv_heads, heads // kv_heads, dim, -1 if window is None else window)
    size = q.element_size()
    codes = cache.dtype is torch.int8
    _attend_all.run(
        (LIKE[q.dtype], _F32, CODES) if codes else (LIKE[q.dtype],) * 3,
        q.data_ptr(),
        q.stride(0) * size,
        q.stride(1) * size,
        out.data_ptr(),
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        kv_heads,
        heads // kv_heads,
        dim,
        -1 if window is None else window,
        float(scale),
        0.0 if softcap is None else float(softcap),
        *lists,
        0 if codes else tile_shapes(q.dtype, dim),
        0 if sinks is None else sinks.data_ptr(),
    )
    return out


_Ints = TypeVar("_Ints", int, torch.Tensor)


def key_value_offsets(
    head: _Ints, position: _Ints, dim: _Ints, head_dim: int, element_size: int
) -> tuple[_Ints, _Ints]:
    """Where a block's memory has K and V of one KV head, position in the block and dimension: in elements from its
    begin. Of one byte are codes, whose scales lie behind those of their head: see `scale_offsets`. Tensors are
    broadcast."""
    base = head * 2 * BLOCK * (head_dim + SCALE_BYTES if element_size == 1 else head_dim)
    if element_size != 2:
        return base + dim * BLOCK + position, base + (BLOCK + position) * head_dim + dim
    key = (dim // 2) * 2 * BLOCK + 2 * position + dim % 2
    value = (position // 2) * 2 * head_dim + 2 * dim + position % 2
    return base + key, base + BLOCK * head_dim + value


def scale_offsets(head: _Ints, position: _Ints, head_dim: int) -> tuple[_Ints, _Ints]:
    """Where a block of codes has the scales of K and V of one KV head and position: in bytes from its begin."""
    base = head * 2 * BLOCK * (head_dim + SCALE_BYTES) + 2 * BLOCK * head_dim + SCALE_BYTES * position
    return base, base + SCALE_BYTES * BLOCK


@jit
def _slots(counts, lengths, starts, tables):
    slots = np.empty(counts.sum(), np.int64)
    row = 0
    for i in range(len(counts)):
        for position in range(lengths[i] - counts[i], lengths[i]):
            slots[row] = np.int64(tables[starts[i] + position // BLOCK]) * BLOCK + position % BLOCK
            row += 1
    return slots


@jit
def _lay_out(counts, lengths, starts, group, window):
    """Tiles and units as in `_Plan`, and the query vectors of tiles of several units."""
    most = max(1, _MAX_VECTORS // group)
    if most > 8:
        most = most // 8 * 8
    num_tiles = 0
    for count in counts:
        num_tiles += (count + most - 1) // most
    tiles = np.empty((num_tiles, _TILE_NUMBERS), np.int64)
    tile, row, num_units, vectors = 0, 0, 0, 0
    for i in range(len(counts)):
        count, length = counts[i], lengths[i]
        together = (count + most - 1) // most >= _ENOUGH_TILES
        for first in range(0, count, most):
            rows = min(most, count - first)
            position = length - count + first
            low = 0 if window < 0 else max(0, position - window + 1)
            end = position + rows
            spans = 1 if together else (end - 1) // SPAN - low // SPAN + 1
            tiles[tile, 0] = starts[i]
            tiles[tile, 1] = row + first
            tiles[tile, 2] = rows
            tiles[tile, 3] = position
            tiles[tile, 4] = low
            tiles[tile, 5] = end
            tiles[tile, 6] = spans
            tiles[tile, 7] = vectors
            if spans > 1:
                vectors += spans * rows * group
            num_units += spans
            tile += 1
        row += count
    units = np.empty((num_units, 2), np.int64)
    unit = 0
    for tile in range(num_tiles):
        for span in range(tiles[tile, 6]):
            units[unit, 0] = tile
            units[unit, 1] = span if tiles[tile, 6] > 1 else -1
            unit += 1
    return tiles, units, vectors


@jit
def _gather(target, q, q_row, q_head, rows, group, dim, like, given):
    """The query vectors of `rows` rows and the first `group` heads at q, side by side."""
    size, target_size = size_of(like), size_of(given)
    for m in range(rows * group):
        source = q + m // group * q_row + m % group * q_head
        for d in range(0, dim, 16):
            place = target + (m * dim + d) * target_size
            if target_size == size:
                copy_vector(place, source + d * size, dim - d, like)
            else:
                store_some(load_some(source + d * size, dim - d, like), place, dim - d, given)


@jit
def _keep(state, size, place):
    """Copy a state of `size` float32."""
    for d in range(0, size, 16):
        store_some(load_some(state + d * 4, size - d, _F32), place + d * 4, size - d, _F32)


def _attend_units(team, arguments, like, given, of_cache):
    """`like`: of queries and answers, `given` and `of_cache`: see `attend`."""
    q, q_row, q_head = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    out, cache, block_bytes = (
        read_int64(arguments + 24),
        read_int64(arguments + 32),
        read_int64(arguments + 40),
    )
    kv_heads, group, dim = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    window, scale, softcap = (
        read_int64(arguments + 72),
        read_float64(arguments + 80),
        read_float64(arguments + 88),
    )
    tables, tiles, units = (
        read_int64(arguments + 96),
        read_int64(arguments + 104),
        read_int64(arguments + 112),
    )
    num_units, done = read_int64(arguments + 120), read_int64(arguments + 128)
    partials, per_head = read_int64(arguments + 136), read_int64(arguments + 144)
    shapes, sinks = read_int64(arguments + 152), read_int64(arguments + 160)
    total_units = num_units * kv_heads
    size = size_of(like)
    out_row = kv_heads * group * dim * size
    vectors = max(_MAX_VECTORS, group)
    queries = np.empty(vectors * dim, np.float32)
    scores = np.empty(vectors * (SEGMENT + 1), np.float32)  # and the highest of each vector
    weights = np.empty(vectors * SEGMENT, np.float32)
    edges = np.empty(2 * BLOCK * dim, np.float32)  # two blocks
    keys = np.empty(SEGMENT // BLOCK, np.int64)
    pairs = np.empty(SEGMENT // 2, np.int64)
    # The state of one span, and of those before it.
    states = np.empty((2, vectors * (dim + 2)), np.float32)
    while True:
        # From the end, where a prompt's longest units are.
        number = total_units - 1 - take_unit(team, total_units)
        if number < 0:
            break
        head = number % kv_heads
        unit = units + number // kv_heads * 16
        tile, only = read_int64(unit), read_int64(unit + 8)
        here = tiles + tile * (_TILE_NUMBERS * 8)
        start, first_row, rows = read_int64(here), read_int64(here + 8), read_int64(here + 16)
        position, low, end = read_int64(here + 24), read_int64(here + 32), read_int64(here + 40)
        parts, offset = read_int64(here + 48), read_int64(here + 56)
        count = rows * group
        source = q + first_row * q_row + head * group * q_head
        _gather(queries.ctypes.data, source, q_row, q_head, rows, group, dim, like, given)
        first, last = low // SPAN, (end - 1) // SPAN
        if only >= 0:
            first, last = first + only, first + only
        state = states.ctypes.data
        for span in range(first, last + 1):
            attend(
                queries.ctypes.data,
                scores.ctypes.data,
                weights.ctypes.data,
                state if span == first else states[1].ctypes.data,
                keys,
                pairs,
                edges.ctypes.data,
                cache,
                block_bytes,
                head,
                group,
                dim,
                tables + start * 4,
                rows,
                position,
                max(low, span * SPAN),
                min(end, (span + 1) * SPAN),
                window,
                scale,
                softcap,
                shapes,
                given,
                of_cache,
            )
            if span != first:
                join_spans(state, states[1].ctypes.data, count, dim)
        if parts > 1:
            part_size = count * (dim + 2)
            mine = partials + head * per_head + offset * (dim + 2) * 4
            _keep(state, part_size, mine + only * part_size * 4)
            counter = done + (tile * kv_heads + head) * 8
            if fetch_add(counter, 1) < parts - 1:
                continue
            fetch_add(counter, -parts)
            _keep(mine, part_size, state)
            for part in range(1, parts):
                join_spans(state, mine + part * part_size * 4, count, dim)
        answer = out + first_row * out_row + head * group * dim * size
        for m in range(count):
            place = answer + m // group * out_row + m % group * dim * size
            finish(state, m, count, sinks, head * group + m % group, place, dim, like)
    if shapes != 0:
        release_tiles()


_attend_all = Kernel(_attend_units, "qqqqqqqqqqddqqqqqqqqq")
