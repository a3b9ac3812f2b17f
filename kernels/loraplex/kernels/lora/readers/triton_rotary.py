"""Triton program of batched LoRA: the B side of Q, K and V, with RoPE and the write into the KV cache."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.layers.triton_rope import store_heads
from loraplex.kernels.lora.readers.triton_columns import updated_columns
from loraplex.kernels.lora.triton_device import FEW_ROWS, HEAD, LIST, PIECE


@triton.jit
def _by_head(x, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, HEADS·BLOCK] → [ROWS, HEADS]: sums of squares."""
    return tl.sum(tl.reshape(x * x, (ROWS, HEADS, BLOCK)), 2)


@triton.jit
def _repeat(x, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, HEADS] → [ROWS, HEADS·BLOCK]"""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, HEADS, BLOCK)), (ROWS, HEADS * BLOCK))


@triton.jit
def _rotary_heads(
    y_ptr,
    y_stride,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cache_block,
    cache_position,
    cache_kind,
    cache_head,
    storage_ptr,
    floats_ptr,
    h_ptr,
    plane_stride,
    row_stride,
    record_ptr,
    first_row,
    num_rows,
    splits,
    first_head,  # of those of the site
    site_head,  # the site's first head
    site_heads,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BY_ROWS: tl.constexpr,
    UPDATE: tl.constexpr,
):
    """HEADS heads of one site, of a piece's rows; without UPDATE of one row of the base."""
    BLOCK: tl.constexpr = HEADS * BLOCK_HALF
    place = tl.arange(0, BLOCK)
    head = first_head + place // BLOCK_HALF
    r = place % BLOCK_HALF
    n = head * HEAD_DIM + r
    there = (head < site_heads) & (r < HALF)
    row = first_row + tl.arange(0, ROWS).to(tl.int64)[:, None]
    row_there = (tl.arange(0, ROWS) < num_rows)[:, None]
    halves = row_there & there[None, :]
    y_here = y_ptr + first_row * y_stride + site_head * HEAD_DIM
    columns = site_heads * HEAD_DIM
    if HEAD_DIM % 16 == 0:
        columns = tl.multiple_of(columns, 16)
    if UPDATE:
        a = updated_columns(
            y_here, y_stride, storage_ptr, floats_ptr, h_ptr, plane_stride, row_stride, record_ptr, num_rows, splits,
            n, there, columns, MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK, BY_ROWS,
        )  # fmt: skip
        b = updated_columns(
            y_here, y_stride, storage_ptr, floats_ptr, h_ptr, plane_stride, row_stride, record_ptr, num_rows, splits,
            HALF + n, there, columns, MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK, BY_ROWS,
        )  # fmt: skip
    else:
        at = y_here + (row - first_row) * y_stride + n[None, :]
        a = tl.load(at, halves, 0.0).to(tl.float32)
        b = tl.load(at + HALF, halves, 0.0).to(tl.float32)
    c = a
    rest_head = head
    rest = r
    rests = halves
    if HEAD_DIM > 2 * HALF:
        REST: tl.constexpr = HEADS * BLOCK_REST
        rest_place = tl.arange(0, REST)
        rest_head = first_head + rest_place // BLOCK_REST
        rest = 2 * HALF + rest_place % BLOCK_REST
        rest_n = rest_head * HEAD_DIM + rest
        rest_there = (rest_head < site_heads) & (rest < HEAD_DIM)
        rests = row_there & rest_there[None, :]
        if UPDATE:
            c = updated_columns(
                y_here, y_stride, storage_ptr, floats_ptr, h_ptr, plane_stride, row_stride, record_ptr, num_rows,
                splits, rest_n, rest_there, columns, MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, REST, BY_ROWS,
            )  # fmt: skip
        else:
            c = tl.load(y_here + (row - first_row) * y_stride + rest_n[None, :], rests, 0.0).to(tl.float32)
    grow = eps
    rest_grow = eps
    if NORM:
        # An update has numbers behind the last column of a half too.
        squares = _by_head(tl.where(halves, a, 0.0), ROWS, HEADS, BLOCK_HALF)
        squares += _by_head(tl.where(halves, b, 0.0), ROWS, HEADS, BLOCK_HALF)
        if HEAD_DIM > 2 * HALF:
            squares += _by_head(tl.where(rests, c, 0.0), ROWS, HEADS, BLOCK_REST)
        by_head = tl.rsqrt(squares / HEAD_DIM + eps)
        grow = _repeat(by_head, ROWS, HEADS, BLOCK_HALF)
        if HEAD_DIM > 2 * HALF:
            rest_grow = _repeat(by_head, ROWS, HEADS, BLOCK_REST)
    store_heads(
        a, b, c, grow, rest_grow, row, (site_head + head)[None, :], r[None, :], halves,
        (site_head + rest_head)[None, :], rest[None, :], rests, y_ptr, y_stride, HEAD_DIM, cos_ptr, sin_ptr,
        cache_ptr, cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, 1.0, 1.0, cache_block, cache_position, cache_kind,
        cache_head, 0, row_there, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_SIZE, NORM, NORM or UPDATE, False,
        False, ROWS, HEADS, BLOCK_HALF, BLOCK_REST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["which", "rows_list", "layer", "first_site"])
def expand_rotary(
    y_ptr,
    y_stride,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    cache_block,
    cache_position,
    cache_kind,
    cache_head,
    storage_ptr,
    floats_ptr,
    h_ptr,
    work_ptr,
    records_ptr,
    which,
    rows_list,
    layer,
    first_site,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SPLIT_SITES: tl.constexpr,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
    BASE_HEADS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`rope_and_write_kv` of Q, K and V as `expand` would leave them in y: queries are rotated there in place, keys and
    values go into the cache alone.

    y [T, (NUM_HEADS + 2·NUM_KV_HEADS)·HEAD_DIM] with rows y_stride apart; cos, sin, cache, slots and the norms' weights
    as for `loraplex.kernels.layers.triton_rope`. Items are HEADS heads of one site of the pieces of list `which`, of up
    to BLOCK_M rows, and BASE_HEADS heads of the rows that are in no piece. SPLIT_SITES: Q, K and V are three sites, not
    one. DEPENDENT as for `expand`.
    """
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    FIRST_HEADS: tl.constexpr = NUM_HEADS if SPLIT_SITES else ALL_HEADS
    FIRST_UNITS: tl.constexpr = (FIRST_HEADS + HEADS - 1) // HEADS
    KV_UNITS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    UNITS: tl.constexpr = FIRST_UNITS + 2 * KV_UNITS if SPLIT_SITES else FIRST_UNITS
    BASE_UNITS: tl.constexpr = (ALL_HEADS + BASE_HEADS - 1) // BASE_HEADS
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    num_items = tl.load(list_ptr + 1) * UNITS
    splits = tl.load(list_ptr + 2)
    rows_ptr = work_ptr + LIST * rows_list
    base_start = tl.load(rows_ptr + 2)
    base_items = tl.load(rows_ptr + 3) * BASE_UNITS
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items + base_items, tl.num_programs(0)):
        if item < num_items:
            piece_ptr = work_ptr + start + item // UNITS * PIECE
            unit = item % UNITS
            first_row = tl.load(piece_ptr).to(tl.int64)
            num_rows = tl.load(piece_ptr + 1)
            slot = tl.load(piece_ptr + 2)
            h_here = h_ptr + tl.load(piece_ptr + 4)
            row_stride = tl.load(piece_ptr + 5)
            site = 0
            first_head = unit * HEADS
            site_head = 0
            site_heads = FIRST_HEADS
            if SPLIT_SITES:
                is_q = unit < FIRST_UNITS
                site = tl.where(is_q, 0, 1 + (unit - FIRST_UNITS) // KV_UNITS)
                first_head = tl.where(is_q, unit, (unit - FIRST_UNITS) % KV_UNITS) * HEADS
                site_head = tl.where(is_q, 0, NUM_HEADS + (site - 1) * NUM_KV_HEADS)
                site_heads = tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
                h_here += site * num_rows * row_stride
            record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site + site) * (
                HEAD + 2 * MAX_CHUNKS
            )
            plane_stride = (3 if SPLIT_SITES else 1) * num_rows * row_stride
            if BY_ROWS and num_rows == 1:
                _rotary_heads(
                    y_ptr, y_stride, cos_ptr, sin_ptr, cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps, cache_block,
                    cache_position, cache_kind, cache_head, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, first_row, num_rows, splits, first_head, site_head, site_heads,
                    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, BLOCK_SIZE, NORM,
                    MAX_CHUNKS, GRANULE, PLANES, 1, HEADS, BLOCK_R, True, True,
                )  # fmt: skip
            elif BY_ROWS and num_rows <= FEW_ROWS:
                _rotary_heads(
                    y_ptr, y_stride, cos_ptr, sin_ptr, cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps, cache_block,
                    cache_position, cache_kind, cache_head, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, first_row, num_rows, splits, first_head, site_head, site_heads,
                    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, BLOCK_SIZE, NORM,
                    MAX_CHUNKS, GRANULE, PLANES, FEW_ROWS, HEADS, BLOCK_R, True, True,
                )  # fmt: skip
            else:
                _rotary_heads(
                    y_ptr, y_stride, cos_ptr, sin_ptr, cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps, cache_block,
                    cache_position, cache_kind, cache_head, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, first_row, num_rows, splits, first_head, site_head, site_heads,
                    NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, BLOCK_SIZE, NORM,
                    MAX_CHUNKS, GRANULE, PLANES, BLOCK_M, HEADS, BLOCK_R, False, True,
                )  # fmt: skip
        else:
            other = item - num_items
            base_row = tl.load(work_ptr + base_start + other // BASE_UNITS).to(tl.int64)
            _rotary_heads(
                y_ptr, y_stride, cos_ptr, sin_ptr, cache_ptr, slots_ptr, q_norm_ptr, k_norm_ptr, eps, cache_block,
                cache_position, cache_kind, cache_head, storage_ptr, floats_ptr, h_ptr, 0, 0, records_ptr,
                base_row, 1, 1, other % BASE_UNITS * BASE_HEADS, 0, ALL_HEADS,
                NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, BLOCK_SIZE, NORM,
                MAX_CHUNKS, GRANULE, PLANES, 1, BASE_HEADS, BLOCK_R, True, False,
            )  # fmt: skip
