"""Triton programs of batched LoRA: the B side of prompts, by strips of columns (`loraplex.kernels.lora.triton_lora`).

A strip is several tiles of a site's columns, one behind the other. The planes of its hidden values are summed once, and
y and B of the next tiles are on their way while a tile is multiplied. Of gate and up, the activation that reads them is
computed there too.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.layers.triton_activation import activated
from loraplex.kernels.lora.triton_device import (
    CHUNK_RANKS,
    HEAD,
    LIST,
    PIECE,
    VECTOR_GRANULE,
    expand_item,
    tile_rows,
)
from loraplex.kernels.lora.triton_expand import sum_of_planes


@triton.jit
def _addends(h, dtype: tl.constexpr):
    """Two bfloat16 whose sum h is, up to 2^-17 of it, where B has them. Of other dtypes h itself, and again."""
    if dtype == tl.bfloat16:
        high = h.to(tl.bfloat16)
        low = (h - high.to(tl.float32)).to(tl.bfloat16)
    else:
        high = h
        low = h
    return high, low


@triton.jit
def _product(high, low, b):
    """[rows, columns] float32, on tensor cores; nothing of the hidden values is lost."""
    if b.dtype == tl.bfloat16:
        found = tl.dot(high, b, tl.dot(low, b))
    elif b.dtype == tl.float16:
        found = tl.dot(high, b.to(tl.float32), input_precision="tf32x3")
    else:
        found = tl.dot(high, b, input_precision="ieee")
    return found


@triton.jit
def _updated(
    y,
    high,
    low,
    storage_ptr,
    has_rank,
    rank_row,
    floats_ptr,
    vectors,
    n,
    num_columns,
):
    """A tile of y and its update, in float32. `vectors`: where the site's are, or 0."""
    b = tl.load(
        storage_ptr + rank_row[:, None] + n[None, :], has_rank[:, None] & (n < num_columns)[None, :], 0.0
    )
    update = _product(high, low, b)
    before = y.to(tl.float32)
    if vectors > 0:
        vectors_ptr = floats_ptr + vectors.to(tl.int64) * VECTOR_GRANULE
        gain = tl.load(vectors_ptr + n, n < num_columns, 0.0)
        offset = tl.load(vectors_ptr + num_columns + n, n < num_columns, 0.0)
        update += gain[None, :] * before + offset[None, :]
    return before + update


@triton.jit(do_not_specialize=["which", "layer", "first_site", "num_sites", "units"])
def expand_strips(
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
    PIECE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGNED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same as `loraplex.kernels.lora.triton_expand.expand`, for adapters of up to BLOCK_R ranks. An item is BLOCK_M
    rows of a piece of up to PIECE_ROWS, and a unit of TILES · BLOCK_N columns."""
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    splits = tl.load(list_ptr + 2)
    PARTS: tl.constexpr = PIECE_ROWS // BLOCK_M
    num_items = tl.load(list_ptr + 1) * PARTS * units
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        block_row = item // units % PARTS * BLOCK_M
        whole = item // units // PARTS * units + item % units
        num_rows, y_here, h_here, row_stride, plane_stride, n_first, num_columns, record_ptr = expand_item(
            y_ptr, y_stride, h_ptr, work_ptr, start, units_ptr, records_ptr, whole, units, layer, first_site,
            num_sites, LAYERS, SITES, MAX_CHUNKS, ALIGNED, False,
        )  # fmt: skip
        num_ranks = tl.load(record_ptr) * CHUNK_RANKS
        if (block_row < num_rows) & (num_ranks > 0):
            vectors = tl.load(record_ptr + 1)
            has_rank, rank_row = tile_rows(
                record_ptr + HEAD + MAX_CHUNKS, 0, num_columns, MAX_CHUNKS, GRANULE, BLOCK_R
            )
            h = sum_of_planes(
                h_here, plane_stride, row_stride, 0, num_ranks, block_row, num_rows, splits,
                PLANES, BLOCK_M, BLOCK_R,
            )  # fmt: skip
            high, low = _addends(h, storage_ptr.dtype.element_ty)
            row = block_row + tl.arange(0, BLOCK_M)
            has_row = (row < num_rows)[:, None]
            y_rows = y_here + row.to(tl.int64)[:, None] * y_stride
            tiles = min(TILES, tl.cdiv(num_columns - n_first, BLOCK_N))
            for tile in tl.range(0, tiles, num_stages=STAGES):
                n = n_first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
                there = has_row & (n < num_columns)[None, :]
                y = tl.load(y_rows + n[None, :], there, 0.0)
                y = _updated(
                    y, high, low, storage_ptr, has_rank, rank_row, floats_ptr, vectors, n, num_columns
                )
                tl.store(y_rows + n[None, :], y.to(y_ptr.dtype.element_ty), there)


@triton.jit
def _gated_site(
    record_ptr,
    h_ptr,
    plane_stride,
    row_stride,
    has_update,
    block_row,
    num_rows,
    splits,
    dtype: tl.constexpr,
    INNER: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A site's hidden values as `_addends`, which of its ranks there are and where their rows of B begin, and where its
    vectors are. Without an update all is zero."""
    num_ranks = tl.load(record_ptr, has_update, 0) * CHUNK_RANKS
    vectors = tl.load(record_ptr + 1, has_update, 0)
    has_rank, rank_row = tile_rows(record_ptr + HEAD + MAX_CHUNKS, 0, INNER, MAX_CHUNKS, GRANULE, BLOCK_R)
    h = sum_of_planes(
        h_ptr, plane_stride, row_stride, 0, num_ranks, block_row, num_rows, splits, PLANES, BLOCK_M, BLOCK_R
    )
    high, low = _addends(h, dtype)
    return high, low, has_rank & has_update, rank_row, vectors


@triton.jit(do_not_specialize=["which", "layer", "first_site"])
def gated_strips(
    y_ptr,
    y_stride,
    out_ptr,
    storage_ptr,
    floats_ptr,
    h_ptr,
    work_ptr,
    records_ptr,
    which,
    layer,
    first_site,
    INNER: tl.constexpr,
    GELU: tl.constexpr,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[row, n] = f(gate) · up of y [T, 2·INNER], gate before up, and its update, rounded as `expand_strips` would
    have put it into y. y itself stays as it is. out [T, INNER].

    Behind the list's pieces come those of all other rows, of slot -1, without an update: y is all of theirs.
    """
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    splits = tl.load(list_ptr + 2)
    PARTS: tl.constexpr = PIECE_ROWS // BLOCK_M
    STRIPS: tl.constexpr = (INNER + TILES * BLOCK_N - 1) // (TILES * BLOCK_N)
    num_items = (tl.load(list_ptr + 1) + tl.load(list_ptr + 3)) * PARTS * STRIPS
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        piece_ptr = work_ptr + start + item // STRIPS // PARTS * PIECE
        block_row = item // STRIPS % PARTS * BLOCK_M
        n_first = item % STRIPS * (TILES * BLOCK_N)
        first_row = tl.load(piece_ptr)
        num_rows = tl.load(piece_ptr + 1)
        slot = tl.load(piece_ptr + 2)
        h_here = h_ptr + tl.load(piece_ptr + 4)
        row_stride = tl.load(piece_ptr + 5)
        if block_row < num_rows:
            record_ptr = records_ptr + ((max(slot, 0) * LAYERS + layer) * SITES + first_site) * (
                HEAD + 2 * MAX_CHUNKS
            )
            height = num_rows * row_stride
            high, low, has_rank, rank_row, vectors = _gated_site(
                record_ptr, h_here, 2 * height, row_stride, slot >= 0, block_row, num_rows, splits,
                storage_ptr.dtype.element_ty, INNER, MAX_CHUNKS, GRANULE, PLANES, BLOCK_M, BLOCK_R,
            )  # fmt: skip
            up_high, up_low, up_has_rank, up_rank_row, up_vectors = _gated_site(
                record_ptr + HEAD + 2 * MAX_CHUNKS, h_here + height, 2 * height, row_stride, slot >= 0,
                block_row, num_rows, splits, storage_ptr.dtype.element_ty, INNER, MAX_CHUNKS, GRANULE,
                PLANES, BLOCK_M, BLOCK_R,
            )  # fmt: skip
            row = block_row + tl.arange(0, BLOCK_M)
            has_row = (row < num_rows)[:, None]
            row = (first_row + row).to(tl.int64)[:, None]
            tiles = min(TILES, tl.cdiv(INNER - n_first, BLOCK_N))
            for tile in tl.range(0, tiles, num_stages=STAGES):
                n = n_first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
                there = has_row & (n < INNER)[None, :]
                gate = tl.load(y_ptr + row * y_stride + n[None, :], there, 0.0)
                up = tl.load(y_ptr + row * y_stride + (INNER + n)[None, :], there, 0.0)
                gate = _updated(
                    gate, high, low, storage_ptr, has_rank, rank_row, floats_ptr, vectors, n, INNER
                )
                up = _updated(
                    up,
                    up_high,
                    up_low,
                    storage_ptr,
                    up_has_rank,
                    up_rank_row,
                    floats_ptr,
                    up_vectors,
                    n,
                    INNER,
                )
                gate = gate.to(y_ptr.dtype.element_ty).to(tl.float32)
                up = up.to(y_ptr.dtype.element_ty).to(tl.float32)
                out = activated(gate, up, GELU).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + row * INNER + n[None, :], out, there)
