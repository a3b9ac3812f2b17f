"""Triton program of batched LoRA: the B side (see `loraplex.kernels.lora.triton_lora`)."""
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
def sum_of_planes(
    h_ptr,
    plane_stride,
    row_stride,
    first_rank,
    num_ranks,
    first_row,
    num_rows,
    splits,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """[ROWS, BLOCK_R]: the sum of the planes, always in the same order. Zero where there is no rank or row."""
    row = first_row + tl.arange(0, ROWS)
    rank = first_rank + tl.arange(0, BLOCK_R)
    there = (row < num_rows)[None, :, None] & (rank < num_ranks)[None, None, :]
    total = tl.zeros((ROWS, BLOCK_R), tl.float32)
    # Several planes in one load: one after the other would wait for memory as often.
    for first_plane in range(0, splits, PLANES):
        plane = first_plane + tl.arange(0, PLANES)
        at = plane[:, None, None] * plane_stride + row[None, :, None] * row_stride + rank[None, None, :]
        total += tl.sum(tl.load(h_ptr + at, (plane < splits)[:, None, None] & there, 0.0), axis=0)
    return total


@triton.jit
def _add_to(y_ptr, y_stride, update, vectors_ptr, has_vectors, row, num_rows, n, num_columns):
    """y + update, and (g - 1) ⊙ y + c besides where the site has vectors. Rounded once."""
    y_at = y_ptr + row.to(tl.int64)[:, None] * y_stride + n[None, :]
    there = (row < num_rows)[:, None] & (n < num_columns)[None, :]
    y = tl.load(y_at, there, 0.0).to(tl.float32)
    if has_vectors:
        gain = tl.load(vectors_ptr + n, n < num_columns, 0.0)
        offset = tl.load(vectors_ptr + num_columns + n, n < num_columns, 0.0)
        update += gain[None, :] * y + offset[None, :]
    tl.store(y_at, (y + update).to(y_ptr.dtype.element_ty), there)


@triton.jit
def _update_by_rows(
    storage_ptr,
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
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[ROWS, BLOCK_N] float32, without tensor cores: each B element is read once and multiplied ROWS times."""
    update = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for first_rank in range(0, num_ranks, BLOCK_R):
        has_rank, rank_row = tile_rows(
            tiles_ptr, first_rank // CHUNK_RANKS, num_columns, MAX_CHUNKS, GRANULE, BLOCK_R
        )
        b = tl.load(
            storage_ptr + rank_row[None, :, None] + n[None, None, :],
            has_rank[None, :, None] & (n < num_columns)[None, None, :],
            0.0,
        )
        h = sum_of_planes(
            h_ptr, plane_stride, row_stride, first_rank, num_ranks, 0, num_rows, splits, PLANES, ROWS, BLOCK_R
        )
        update += tl.sum(h[:, :, None] * b.to(tl.float32), axis=1)
    return update


@triton.jit
def _update_by_tiles(
    storage_ptr,
    h_ptr,
    plane_stride,
    row_stride,
    tiles_ptr,
    num_ranks,
    first_row,
    num_rows,
    splits,
    n,
    num_columns,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] float32 of the rows from first_row on, on tensor cores. The hidden values go in as the sum of
    two numbers of B's dtype, or of what the tensor cores can do for float16, so that nothing of them is lost.

    BLOCK_M stays below 64: from there on Hopper would take them from registers by WGMMA, which ptxas 12.8 gets wrong
    in a pipelined loop (triton #9433).
    """
    update = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_rank in range(0, num_ranks, BLOCK_R):
        has_rank, rank_row = tile_rows(
            tiles_ptr, first_rank // CHUNK_RANKS, num_columns, MAX_CHUNKS, GRANULE, BLOCK_R
        )
        b = tl.load(
            storage_ptr + rank_row[:, None] + n[None, :],
            has_rank[:, None] & (n < num_columns)[None, :],
            0.0,
        )
        h = sum_of_planes(
            h_ptr, plane_stride, row_stride, first_rank, num_ranks, first_row, num_rows, splits,
            PLANES, BLOCK_M, BLOCK_R,
        )  # fmt: skip
        if b.dtype == tl.bfloat16:
            high = h.to(tl.bfloat16)
            update = tl.dot((h - high.to(tl.float32)).to(tl.bfloat16), b, update)
            update = tl.dot(high, b, update)
        elif b.dtype == tl.float16:
            update = tl.dot(h, b.to(tl.float32), update, input_precision="tf32x3")
        else:
            update = tl.dot(h, b, update, input_precision="ieee")
    return update


@triton.jit(do_not_specialize=["which", "layer", "first_site", "num_sites", "units"])
def expand(
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
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    BY_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y[row, n] += the sum over ranks of h[row, rank] · B[rank, n], where h is the sum of its planes; and what the
    vectors add (see `loraplex.kernels.lora.dispatch`).

    y [T, N] with rows y_stride apart, h as `shrink` left it. The list is number `which` of `work`, a unit is BLOCK_N
    columns of a site. `floats` is the storage as float32. ALIGNED: every site's width is a multiple of 16.
    DEPENDENT: it may begin before `shrink` has ended; lists and records are older than both.
    """
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    num_items = tl.load(list_ptr + 1) * units
    splits = tl.load(list_ptr + 2)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        num_rows, y_here, h_here, row_stride, plane_stride, n_first, num_columns, record_ptr = expand_item(
            y_ptr, y_stride, h_ptr, work_ptr, start, units_ptr, records_ptr, item, units, layer, first_site,
            num_sites, LAYERS, SITES, MAX_CHUNKS, ALIGNED, False,
        )  # fmt: skip
        num_ranks = tl.load(record_ptr) * CHUNK_RANKS
        if num_ranks > 0:
            vectors = tl.load(record_ptr + 1)
            vectors_ptr = floats_ptr + vectors.to(tl.int64) * VECTOR_GRANULE
            tiles_ptr = record_ptr + HEAD + MAX_CHUNKS
            n = n_first + tl.arange(0, BLOCK_N)
            if BY_ROWS and num_rows == 1:
                one = _update_by_rows(
                    storage_ptr, h_here, plane_stride, row_stride, tiles_ptr, num_ranks, num_rows, splits,
                    n, num_columns, MAX_CHUNKS, GRANULE, PLANES, 1, BLOCK_R, BLOCK_N,
                )  # fmt: skip
                row = tl.arange(0, 1)
                _add_to(y_here, y_stride, one, vectors_ptr, vectors > 0, row, num_rows, n, num_columns)
            elif BY_ROWS and num_rows <= FEW_ROWS:
                few = _update_by_rows(
                    storage_ptr, h_here, plane_stride, row_stride, tiles_ptr, num_ranks, num_rows, splits,
                    n, num_columns, MAX_CHUNKS, GRANULE, PLANES, FEW_ROWS, BLOCK_R, BLOCK_N,
                )  # fmt: skip
                some = tl.arange(0, FEW_ROWS)
                _add_to(y_here, y_stride, few, vectors_ptr, vectors > 0, some, num_rows, n, num_columns)
            else:
                for first in range(0, num_rows, BLOCK_M):
                    many = _update_by_tiles(
                        storage_ptr, h_here, plane_stride, row_stride, tiles_ptr, num_ranks, first, num_rows,
                        splits, n, num_columns, MAX_CHUNKS, GRANULE, PLANES, BLOCK_M, BLOCK_R, BLOCK_N,
                    )  # fmt: skip
                    all_rows = first + tl.arange(0, BLOCK_M)
                    _add_to(
                        y_here, y_stride, many, vectors_ptr, vectors > 0, all_rows, num_rows, n, num_columns
                    )
