"""Triton program of batched LoRA: the B side of few rows, without tensor cores (`loraplex.kernels.lora.triton_lora`).

A program is one warp and takes 256 columns, so that each thread has 8 neighbouring columns of every rank: a load of 16
bytes for each rank, all independent, and sums that stay in the thread. Pieces have up to ROW_ROWS rows.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_device import (
    CHUNK_RANKS,
    FEW_ROWS,
    HEAD,
    LIST,
    VECTOR_GRANULE,
    expand_item,
    tile_rows,
)


@triton.jit
def _tiles(
    storage_ptr,
    tiles_ptr,
    first_rank,
    n,
    num_columns,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    RANKS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """[1, RANKS, columns] of B. ONCE: they are hardly read again."""
    has_rank, rank_row = tile_rows(
        tiles_ptr, first_rank // CHUNK_RANKS, num_columns, MAX_CHUNKS, GRANULE, RANKS
    )
    return tl.load(
        storage_ptr + rank_row[None, :, None] + n[None, None, :],
        has_rank[None, :, None] & (n < num_columns)[None, None, :],
        0.0,
        eviction_policy="evict_first" if ONCE else "",
    )


@triton.jit
def _hidden(
    h_ptr,
    plane_stride,
    row_stride,
    first_rank,
    num_ranks,
    num_rows,
    splits,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """[ROWS, RANKS, 1]: the sum of the planes, in their order; no load waits for another. Zero where there is none."""
    row = tl.arange(0, ROWS)
    rank = first_rank + tl.arange(0, RANKS)
    at = h_ptr + row[:, None] * row_stride + rank[None, :]
    there = (row < num_rows)[:, None] & (rank < num_ranks)[None, :]
    total = tl.load(at, there, 0.0)
    for plane in range(1, splits):
        total += tl.load(at + plane * plane_stride, there, 0.0)
    return total[:, :, None]


@triton.jit
def _expand_piece(
    y_ptr,
    y_stride,
    storage_ptr,
    vectors_ptr,
    has_vectors,
    h_ptr,
    plane_stride,
    row_stride,
    tiles_ptr,
    num_ranks,
    num_rows,
    splits,
    n,
    num_columns,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y += the piece's update, rounded once. The first tiles are loaded before the wait for hidden values, y behind it:
    then it is there even where the A side began while y was written."""
    b = _tiles(storage_ptr, tiles_ptr, 0, n, num_columns, MAX_CHUNKS, GRANULE, RANKS, ROWS == 1)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, ROWS)
    y_at = y_ptr + row.to(tl.int64)[:, None] * y_stride + n[None, :]
    there = (row < num_rows)[:, None] & (n < num_columns)[None, :]
    before = tl.load(y_at, there, 0.0)
    h = _hidden(h_ptr, plane_stride, row_stride, 0, num_ranks, num_rows, splits, ROWS, RANKS)
    update = tl.sum(h * b.to(tl.float32), axis=1)
    for first_rank in range(RANKS, num_ranks, RANKS):
        b = _tiles(storage_ptr, tiles_ptr, first_rank, n, num_columns, MAX_CHUNKS, GRANULE, RANKS, ROWS == 1)
        h = _hidden(h_ptr, plane_stride, row_stride, first_rank, num_ranks, num_rows, splits, ROWS, RANKS)
        update += tl.sum(h * b.to(tl.float32), axis=1)
    y = before.to(tl.float32)
    if has_vectors:
        gain = tl.load(vectors_ptr + n, n < num_columns, 0.0)
        offset = tl.load(vectors_ptr + num_columns + n, n < num_columns, 0.0)
        update += gain[None, :] * y + offset[None, :]
    tl.store(y_at, (y + update).to(y_ptr.dtype.element_ty), there)


@triton.jit(do_not_specialize=["which", "layer", "first_site", "num_sites", "units"])
def expand_rows(
    y_ptr,
    y_stride,
    storage_ptr,
    floats_ptr,
    h_ptr,
    work_ptr,
    units_ptr,
    records_ptr,
    which,
    layer,
    first_site,
    num_sites,
    units,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same as `loraplex.kernels.lora.triton_expand.expand`, of pieces of up to ROW_ROWS rows. A single row takes
    RANKS ranks at a time, several half of them: as many as their sums leave registers for.
    """
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    num_items = tl.load(list_ptr + 1) * units
    splits = tl.load(list_ptr + 2)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        num_rows, y_here, h_here, row_stride, plane_stride, n_first, num_columns, record_ptr = expand_item(
            y_ptr, y_stride, h_ptr, work_ptr, start, units_ptr, records_ptr, item, units, layer, first_site,
            num_sites, LAYERS, SITES, MAX_CHUNKS, ALIGNED, True,
        )  # fmt: skip
        num_ranks = tl.load(record_ptr) * CHUNK_RANKS
        if num_ranks > 0:
            vectors = tl.load(record_ptr + 1)
            vectors_ptr = floats_ptr + vectors.to(tl.int64) * VECTOR_GRANULE
            tiles_ptr = record_ptr + HEAD + MAX_CHUNKS
            n = n_first + tl.arange(0, BLOCK_N)
            if num_rows == 1:
                _expand_piece(
                    y_here, y_stride, storage_ptr, vectors_ptr, vectors > 0, h_here, plane_stride, row_stride,
                    tiles_ptr, num_ranks, num_rows, splits, n, num_columns,
                    MAX_CHUNKS, GRANULE, 1, RANKS, DEPENDENT,
                )  # fmt: skip
            else:
                _expand_piece(
                    y_here, y_stride, storage_ptr, vectors_ptr, vectors > 0, h_here, plane_stride, row_stride,
                    tiles_ptr, num_ranks, num_rows, splits, n, num_columns,
                    MAX_CHUNKS, GRANULE, FEW_ROWS, RANKS // 2, DEPENDENT,
                )  # fmt: skip
    if DEPENDENT:
        # The next A side writes hidden values again: no program may end before this one's, even without an item.
        tl.extra.cuda.gdc_wait()
