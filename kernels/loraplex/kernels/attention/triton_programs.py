"""The Triton programs of paged attention; `loraplex.kernels.attention.triton_attention` launches them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

GROWTH = tl.constexpr(128.0)
"""Weights of codes are multiplied with V's scales, which are about a 127th of its numbers: float16 has no digits for
that. So they are made that much larger, and answers smaller by as much."""


@triton.jit
def attention_program(
    q_ptr,
    cache_ptr,
    scales_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    items_ptr,
    count_ptr,
    tables_ptr,
    sinks_ptr,
    q_row,
    q_head,
    cache_block,
    cache_position,
    cache_kind,
    cache_head,
    scales_kind,
    scale,
    softcap,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    UNITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INTERIOR: tl.constexpr,
    CODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One item of a list, for one KV head and TILE_HEADS of the query heads that share it. Grid: UNITS programs for
    each item that there is room for; those beyond the list's length end at once.

    q [T, Hq, D] with strides q_row, q_head; cache [N, P, 2, Hkv, D] with strides, D contiguous; CODES: it is of codes,
    with their scales at `scales_ptr` (`triton_attention.cache_operands`); out [T, Hq, D]; part
    [R, Hq, D] and lse [R, Hq] float32, the latter to base 2; items [n, 8], count and tables int32; sinks [Hq] float32,
    which without HAS_SINKS is not read. INTERIOR: tiles that every row sees whole go without masks.
    """
    program = tl.program_id(0)
    if program // UNITS >= tl.load(count_ptr):
        return
    # Neighbouring programs read neighbouring heads of the same blocks.
    unit = program % UNITS
    kv_head = unit // PARTS
    item_ptr = items_ptr + program // UNITS * 8
    first_row = tl.load(item_ptr)
    num_rows = tl.load(item_ptr + 1)
    first_position = tl.load(item_ptr + 2)
    begin = tl.load(item_ptr + 3)
    end = tl.load(item_ptr + 4)
    table_ptr = tables_ptr + tl.load(item_ptr + 5)
    part_row = tl.load(item_ptr + 6)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = m // TILE_HEADS
    in_group = unit % PARTS * TILE_HEADS + m % TILE_HEADS
    head = kv_head * GROUP + in_group
    row_ok = (query < num_rows) & (in_group < GROUP)
    position = first_position + query
    q_at = (first_row + query).to(tl.int64) * q_row + head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=row_ok[:, None] & (d < HEAD_DIM)[None, :], other=0.0)

    # Keys and values of a position beyond `end` or before `begin` are never loaded: they may hold anything, and a
    # masked NaN would still spoil a sum.
    k_ptr = cache_ptr + kv_head.to(tl.int64) * cache_head
    v_ptr = k_ptr + cache_kind
    k_scales_ptr = scales_ptr + kv_head * BLOCK_SIZE
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if INTERIOR:
        # [begin, inner) the window cuts for some rows, [outer, end) the future does; every row sees all between.
        inner = begin
        if HAS_WINDOW:
            missed = tl.maximum(first_position + num_rows - window - begin, 0)
            inner = begin + (missed + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        outer = inner + tl.maximum(tl.minimum(end, first_position + 1) - inner, 0) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            for start in range(begin, tl.minimum(inner, end), BLOCK_N):
                acc, best, total = _attend(
                    q, k_ptr, v_ptr, k_scales_ptr, table_ptr, acc, best, total, start, end, position, cache_block,
                    cache_position, scales_kind, scale, softcap, window, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True,
                    HAS_WINDOW, HAS_SOFTCAP, CODES, PRECISION,
                )  # fmt: skip
        for start in range(inner, outer, BLOCK_N):
            acc, best, total = _attend(
                q, k_ptr, v_ptr, k_scales_ptr, table_ptr, acc, best, total, start, end, position, cache_block,
                cache_position, scales_kind, scale, softcap, window, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, False,
                HAS_WINDOW, HAS_SOFTCAP, CODES, PRECISION,
            )  # fmt: skip
        begin = outer
    for start in range(begin, end, BLOCK_N):
        acc, best, total = _attend(
            q, k_ptr, v_ptr, k_scales_ptr, table_ptr, acc, best, total, start, end, position, cache_block,
            cache_position, scales_kind, scale, softcap, window, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, True,
            HAS_WINDOW, HAS_SOFTCAP, CODES, PRECISION,
        )  # fmt: skip

    if HAS_SINKS:
        # An answer in parts gets its sink where they are merged.
        sink = tl.load(sinks_ptr + head, mask=row_ok & (part_row < 0), other=float("-inf"))
        acc, best, total = _add_sink(acc, best, total, sink)
    # A row that saw nothing, as padding's do: 0. One whose scores are NaN must stay NaN.
    divisor = tl.where(total == 0, 1.0, total)
    answer = acc / divisor[:, None]
    if CODES:
        answer = answer * (1 / GROWTH)
    stored = row_ok[:, None] & (d < HEAD_DIM)[None, :]
    if part_row < 0:
        out_at = ((first_row + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
        tl.store(out_ptr + out_at[:, None] + d[None, :], answer.to(out_ptr.dtype.element_ty), mask=stored)
    else:
        lse_at = (part_row + query).to(tl.int64) * NUM_HEADS + head
        lse = tl.where(total == 0, float("-inf"), best + tl.log2(divisor))
        tl.store(lse_ptr + lse_at, lse, mask=row_ok)
        tl.store(part_ptr + lse_at[:, None] * HEAD_DIM + d[None, :], answer, mask=stored)


@triton.jit
def _attend(
    q,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    table_ptr,
    acc,
    best,
    total,
    start,
    end,
    position,
    cache_block,
    cache_position,
    scales_kind,
    scale,
    softcap,
    window,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    CODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Positions start … start+BLOCK_N-1: the online softmax of FlashAttention (Dao et al., 2022), to base 2."""
    d = tl.arange(0, BLOCK_D)
    j = start + tl.arange(0, BLOCK_N)
    if MASKED:
        block = tl.load(table_ptr + j // BLOCK_SIZE, mask=j < end, other=0)
        loaded = (j < end)[:, None] & (d < HEAD_DIM)[None, :]
    else:
        block = tl.load(table_ptr + j // BLOCK_SIZE)
        loaded = (d < HEAD_DIM)[None, :]
    at = block.to(tl.int64) * cache_block + j % BLOCK_SIZE * cache_position
    if CODES:
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=loaded, other=0).to(q.dtype)
        scales_at = block.to(tl.int64) * (cache_block // 2) + j % BLOCK_SIZE
        k_scale = tl.load(k_scales_ptr + scales_at, mask=j < end, other=0.0).to(tl.float32)
        v_scale = tl.load(k_scales_ptr + scales_kind + scales_at, mask=j < end, other=0.0).to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * k_scale[None, :]
    else:
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which ends at ±1 where exp does at infinity or 0.
        grown = tl.exp2(scores * (2 * 1.4426950408889634 * scale / softcap))
        scores = (1 - 2 / (grown + 1)) * (softcap * 1.4426950408889634)
    else:
        scores = scores * (scale * 1.4426950408889634)
    if MASKED:
        # `end` needs no mask of its own: it is a tile's, or behind every row's position.
        seen = j[None, :] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (j[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # Where nothing has been seen yet, -inf minus itself must not become NaN.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(scores - shift[:, None])
    faded = tl.exp2(best - shift)
    if CODES:
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=loaded, other=0).to(q.dtype)
        acc = tl.dot(
            (p * (v_scale * GROWTH)[None, :]).to(q.dtype), v, acc * faded[:, None], input_precision=PRECISION
        )
    else:
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=loaded, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * faded[:, None], input_precision=PRECISION)
    return acc, higher, total * faded + tl.sum(p, 1)


@triton.jit
def _add_sink(acc, best, total, sink):
    """The softmax of acc [M, D] so far with a score more, sink [M], that has no value."""
    score = sink * 1.4426950408889634
    higher = tl.maximum(best, score)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    faded = tl.exp2(best - shift)
    return acc * faded[:, None], higher, total * faded + tl.exp2(score - shift)


@triton.jit
def merge_program(
    part_ptr,
    lse_ptr,
    out_ptr,
    entries_ptr,
    count_ptr,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """out[row, head] = the sum of its parts, each weighted with 2^lse, in their order. Grid: NUM_HEADS programs for
    each entry that there is room for. Tensors as in `attention_program`; entries [n, 4]."""
    program = tl.program_id(0)
    if program // NUM_HEADS >= tl.load(count_ptr):
        return
    head = program % NUM_HEADS
    entry_ptr = entries_ptr + program // NUM_HEADS * 4
    row = tl.load(entry_ptr)
    base = tl.load(entry_ptr + 1)
    step = tl.load(entry_ptr + 2)
    num_parts = tl.load(entry_ptr + 3)
    d = tl.arange(0, BLOCK_D)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        there = part < num_parts
        at = (base + part * step).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(lse_ptr + at, mask=there, other=float("-inf"))
        values = tl.load(
            part_ptr + at[:, None] * HEAD_DIM + d[None, :],
            mask=there[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        higher = tl.maximum(best, tl.max(lse, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - shift)
        faded = tl.exp2(best - shift)
        acc = acc * faded + tl.sum(weight[:, None] * values, 0)
        total = total * faded + tl.sum(weight, 0)
        best = higher
    if HAS_SINKS:
        sunk, best, total = _add_sink(
            acc[None, :], best, total, tl.load(sinks_ptr + head + tl.zeros([1], tl.int32))
        )
        acc = tl.reshape(sunk, [BLOCK_D])
    answer = acc / tl.where(total == 0, 1.0, total)
    out_at = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_ptr + out_at + d, answer.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
