"""One span of positions for the query vectors of one unit of attention on a CPU, and how spans are joined.

A unit is some rows of one sequence, and the query heads that share one KV head. Its M = rows · heads query vectors go
through a span in segments: scores of a segment, the running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022),
its share of the sum of values. Weights are powers of two: exp(x) = 2^(x·log2 e).

Spans and segments begin at multiples of their length, counted from the sequence's first position. Positions that a row
does not see have weight 0 there, and adding 0 changes no bit. So a row's state behind a span depends on the positions
that it sees alone, not on the rows that go through the span with it, nor on the position at which the unit begins.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.attention.numba_attention_amx import all_scores as scores_of_tiles
from loraplex.kernels.attention.numba_attention_amx import all_values as values_of_tiles
from loraplex.kernels.attention.numba_attention_products import (
    BLOCK,
    BLOCKS_AT_ONCE,
    SEGMENT,
    all_scores,
    all_values,
    factor_size_of,
    head_bytes_of,
    is_codes,
)
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import (
    exp2,
    first_lane,
    fma,
    horizontal_max,
    horizontal_sum,
    jit,
    keep_lanes,
    load,
    load_some,
    maximum,
    read_float32,
    read_int32,
    size_of,
    splat,
    store,
    store_some,
    tanh,
    write_float32,
)

_F32 = np.float32(0)
_F16 = np.int16(0)
_BLOCKS = SEGMENT // BLOCK
_LOWEST = np.float32(-3e38)  # finite: -inf less -inf is NaN
_HIDDEN = np.float32(-math.inf)
_LOG2_E = np.float32(math.log2(math.e))


@intrinsic
def copy_vector(typing, target, source, count, like):
    """min(count, 16) elements from address to address, bit by bit."""

    def lower(context, builder, signature, values):
        target, source, count, _ = values
        size = nir.elements(context, signature.args[3]).size
        kind, suffix = (nir.V_I32, "v16i32") if size == 4 else (nir.V_I16, "v16i16")
        mask = nir.lane_mask(builder, nir.i64(0), count)
        nir.masked_store(
            builder, nir.masked_load(builder, source, mask, kind, suffix, size), target, mask, suffix, size
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, like), lower


@intrinsic
def _copy_half(typing, target, source, count, odd):
    """min(count, 16) pairs of 16-bit elements, with zeros for the even ones, or for the odd ones."""

    def lower(context, builder, signature, values):
        target, source, count, odd = values
        mask = nir.lane_mask(builder, nir.i64(0), count)
        found = nir.masked_load(builder, source, mask, nir.V_I32, "v16i32", 4)
        is_odd = builder.icmp_signed("!=", odd, nir.i64(0))
        kept = builder.select(is_odd, ir.Constant(nir.I32, -65536), ir.Constant(nir.I32, 65535))
        nir.masked_store(builder, builder.and_(found, nir.splat(builder, kept)), target, mask, "v16i32", 4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), lower


@jit
def _cap_scores(scores, num_blocks, scale, softcap):
    for block in range(num_blocks):
        at = scores + block * 64
        store(tanh(load(at, _F32) * splat(scale / softcap)) * splat(softcap), at, _F32)


@jit
def _largest_score(scores, num_blocks, first, last):
    """The largest score of the positions first … last-1 of a segment. Scores of other positions of these blocks become
    -inf."""
    highest = splat(_HIDDEN)
    if first <= 0 and last >= SEGMENT:
        for block in range(_BLOCKS):
            highest = maximum(load(scores + block * 64, _F32), highest)
        return horizontal_max(highest)
    for block in range(max(first, 0) // BLOCK, min((last + BLOCK - 1) // BLOCK, num_blocks)):
        at, start = scores + block * 64, block * BLOCK
        s = load(at, _F32)
        if start < first or start + BLOCK > last:
            s = keep_lanes(s, first - start, last - start, _HIDDEN)
            store(s, at, _F32)
        highest = maximum(s, highest)
    return horizontal_max(highest)


@jit
def _weigh(scores, num_blocks, first, last, factor, top, weights, like):
    """The weights 2^(s·factor - top) of the positions first … last-1 of a segment, 0 elsewhere, behind
    `_largest_score`. Returns their sum."""
    size = BLOCK * size_of(like)
    total, by, less = splat(_F32), splat(factor), splat(_F32 - top)
    if first <= 0 and last >= SEGMENT:
        for block in range(_BLOCKS):
            e = exp2(fma(load(scores + block * 64, _F32), by, less))
            total = total + e
            store(e, weights + block * size, like)
        return horizontal_sum(total)
    begin, end = max(first, 0) // BLOCK, min((last + BLOCK - 1) // BLOCK, num_blocks)
    for block in range(min(begin, num_blocks)):
        store(splat(_F32), weights + block * size, like)
    for block in range(max(end, 0), num_blocks):
        store(splat(_F32), weights + block * size, like)
    for block in range(begin, end):
        e = exp2(fma(load(scores + block * 64, _F32), by, less))
        total = total + e
        store(e, weights + block * size, like)
    return horizontal_sum(total)


@jit
def _scale_scores(scores, num_blocks, keys, offset):
    """Scores of codes become those of K. The scales of a block of `keys` [num_blocks] lie `offset` bytes on."""
    for block in range(num_blocks):
        at = scores + block * 64
        store(load(at, _F32) * load(keys[block] + offset, _F16), at, _F32)


@jit
def _scale_weights(weights, num_blocks, first, last, keys, offset):
    """The weights of the positions first … last-1 of a segment become those of V's codes. Scales as above; those of
    other positions may be NaN, and their weights stay 0."""
    for block in range(max(first, 0) // BLOCK, min((last + BLOCK - 1) // BLOCK, num_blocks)):
        at, start = weights + block * 64, block * BLOCK
        w = load(at, _F32) * load(keys[block] + offset, _F16)
        if start < first or start + BLOCK > last:
            w = keep_lanes(w, first - start, last - start, _F32)
        store(w, at, _F32)


@jit
def _raise_tops(tops, sums, highest, faded, count, factor):
    """The new tops of `count` rows, and what their sums so far are multiplied with, which `faded` keeps."""
    for m in range(0, count, 16):
        at, left = m * 4, count - m
        old = load_some(tops + at, left, _F32)
        top = maximum(load_some(highest + at, left, _F32) * splat(factor), old)
        power = exp2(old - top)
        store_some(top, tops + at, left, _F32)
        store_some(power, faded + at, left, _F32)
        store_some(load_some(sums + at, left, _F32) * power, sums + at, left, _F32)


@jit
def _power(x):
    """2^x for x ≤ 0."""
    return first_lane(exp2(splat(x)))


@jit
def _clear(row, count):
    for d in range(0, count, 16):
        store_some(splat(_F32), row + d * 4, count - d, _F32)


@jit
def _edge_pair(source, target, dim, odd, like):
    """A pair of positions with zeros for one of them: what is there does not count, not even a NaN."""
    if size_of(like) == 4:
        for d in range(0, dim, 16):
            at, other = (odd * dim + d) * 4, ((1 - odd) * dim + d) * 4
            copy_vector(target + at, source + at, dim - d, like)
            store_some(splat(_F32), target + other, dim - d, _F32)
    else:
        for d in range(0, dim, 16):
            _copy_half(target + d * 4, source + d * 4, dim - d, odd)
    return target


@jit
def _find(keys, pairs, edges, cache, block_bytes, head, dim, table, segment, num_blocks, low, high, like):
    """The addresses of a segment's blocks of K and of its pairs of positions of V; low … high-1 are seen.
    Returns the first pair's number in the segment, and how many there are."""
    half, head_bytes = BLOCK * dim * size_of(like), head_bytes_of(dim, like)
    pair_bytes = 2 * dim * size_of(like)
    first_pair, end_pair = (low - segment) // 2, (high - segment + 1) // 2
    # Those before the first one that is seen may be anybody's now.
    first_block = (low - segment) // BLOCK
    for block in range(first_block, num_blocks):
        number = read_int32(table + (segment // BLOCK + block) * 4)
        k = cache + number * block_bytes + head * head_bytes
        keys[block] = k
        for pair in range(max(first_pair, block * 8), min(end_pair, block * 8 + 8)):
            pairs[pair - first_pair] = k + half + (pair - block * 8) * pair_bytes
    for block in range(first_block):
        keys[block] = keys[first_block]
    for block in range(num_blocks, (num_blocks + BLOCKS_AT_ONCE - 1) // BLOCKS_AT_ONCE * BLOCKS_AT_ONCE):
        keys[block] = keys[first_block]
    count = end_pair - first_pair
    if is_codes(like):
        return first_pair, count  # any code is finite, and has weight 0 where it is not seen
    if (low - segment) % 2 == 1:
        pairs[0] = _edge_pair(pairs[0], edges, dim, 1, like)
    if (high - segment) % 2 == 1:
        # One position alone that is odd has no even one at its side: low is even where the two are one.
        pairs[count - 1] = _edge_pair(pairs[count - 1], edges + pair_bytes, dim, 0, like)
    return first_pair, count


@jit
def _find_blocks(values, keys, edges, dim, num_blocks, first, last, like):
    """The addresses of a segment's blocks of V, for the blocks of K that `_find` found; the positions first … last-1 of
    the segment are seen. Of a block that has others too there is a copy with zeros for them: what is there does not
    count, not even a NaN. Returns the first block's number."""
    half, row_bytes = BLOCK * dim * size_of(like), 2 * dim * size_of(like)
    begin = first // BLOCK
    for block in range(begin, num_blocks):
        source, start = keys[block] + half, block * BLOCK
        values[block] = source
        if start < first or start + BLOCK > last:
            target = edges + (0 if block == begin else half)
            values[block] = target
            for pair in range(BLOCK // 2):
                even = start + 2 * pair
                at, place = target + pair * row_bytes, source + pair * row_bytes
                sees_even, sees_odd = first <= even < last, first <= even + 1 < last
                if sees_even and sees_odd:
                    for d in range(0, 2 * dim, 16):
                        copy_vector(at + d * size_of(like), place + d * size_of(like), 2 * dim - d, like)
                elif sees_even or sees_odd:
                    _edge_pair(place, at, dim, 1 if sees_odd else 0, like)
                else:
                    for d in range(0, 2 * dim, 16):
                        store_some(splat(_F32), at + d * size_of(like), 2 * dim - d, like)
    return begin


@jit
def attend(
    q,
    scores,
    weights,
    state,
    keys,
    pairs,
    edges,
    cache,
    block_bytes,
    head,
    group,
    dim,
    table,
    rows,
    position,
    low,
    high,
    window,
    scale,
    softcap,
    shapes,
    given,
    like,
):
    """One span: the state behind the positions low … high-1, for the gathered query vectors q [M, dim], M = rows·group;
    those of row r stand at position + r. A state is totals [M, dim], tops [M], which are logarithms to base 2, and sums
    [M], all float32, one behind the other. `shapes`: of `numba_attention_amx.tile_shapes`. `like` stands for the dtype
    of K and V, `given` for that of the query vectors and weights: float32 beside codes, else the same."""
    of_keys = 2 * BLOCK * dim
    of_values = of_keys + 2 * BLOCK
    count = rows * group
    faded = scores + count * SEGMENT * 4
    totals, tops, sums = state, state + count * dim * 4, state + count * (dim + 1) * 4
    for m in range(count):
        write_float32(_LOWEST, tops + m * 4)
        write_float32(_F32, sums + m * 4)
    _clear(totals, count * dim)
    factor = _LOG2_E if softcap != 0.0 else np.float32(scale) * _LOG2_E
    segment = low // SEGMENT * SEGMENT
    while segment < high:
        end = min(high, segment + SEGMENT)
        start = max(low, segment)
        num_blocks = (end - segment + BLOCK - 1) // BLOCK
        first_pair, num_pairs = _find(
            keys, pairs, edges, cache, block_bytes, head, dim, table, segment, num_blocks, start, end, like
        )
        if shapes != 0:
            scores_of_tiles(count, q, dim, keys.ctypes.data, num_blocks, scores, shapes)
        else:
            all_scores(count, q, dim, keys.ctypes.data, num_blocks, scores, like)
        for m in range(count):
            at = position + m // group
            first = start if window < 0 else max(start, at - window + 1)
            row, last = scores + m * SEGMENT * 4, min(end, at + 1)
            if is_codes(like):
                _scale_scores(row, num_blocks, keys, of_keys)
            if softcap != 0.0:
                _cap_scores(row, num_blocks, scale, softcap)
            highest = _largest_score(row, num_blocks, first - segment, last - segment)
            write_float32(highest, faded + m * 4)
        _raise_tops(tops, sums, faded, faded, count, factor)
        for m in range(count):
            at = position + m // group
            first = start if window < 0 else max(start, at - window + 1)
            last = min(end, at + 1)
            own = weights + m * SEGMENT * factor_size_of(like)
            total = _weigh(
                scores + m * SEGMENT * 4,
                num_blocks,
                first - segment,
                last - segment,
                factor,
                read_float32(tops + m * 4),
                own,
                given,
            )
            if is_codes(like):
                _scale_weights(own, num_blocks, first - segment, last - segment, keys, of_values)
            write_float32(read_float32(sums + m * 4) + total, sums + m * 4)
        if shapes != 0:
            block = _find_blocks(pairs, keys, edges, dim, num_blocks, start - segment, end - segment, like)
            seen, places = weights + block * BLOCK * factor_size_of(like), pairs.ctypes.data + block * 8
            values_of_tiles(count, seen, places, num_blocks - block, dim, totals, faded, shapes)
        else:
            seen = weights + 2 * first_pair * factor_size_of(like)
            all_values(count, seen, pairs.ctypes.data, num_pairs, dim, totals, faded, like)
        segment += SEGMENT


@jit
def join_spans(state, following, count, dim):
    """The state of `count` query vectors behind a span, joined with that of the next one alone, in place."""
    tops, sums = count * dim * 4, count * (dim + 1) * 4
    for m in range(count):
        at = m * 4
        old, other = read_float32(state + tops + at), read_float32(following + tops + at)
        top = max(old, other)
        mine, its = _power(old - top), _power(other - top)
        for d in range(m * dim, m * dim + dim, 16):
            left = m * dim + dim - d
            value = load_some(following + d * 4, left, _F32) * splat(its)
            value = fma(load_some(state + d * 4, left, _F32), splat(mine), value)
            store_some(value, state + d * 4, left, _F32)
        weight_sum = read_float32(state + sums + at) * mine + read_float32(following + sums + at) * its
        write_float32(top, state + tops + at)
        write_float32(weight_sum, state + sums + at)


@jit
def finish(state, m, count, sinks, sink, out, dim, like):
    """out = total / sum, rounded, of query vector m. sinks: address of a float32 for each head; 0: there are none.
    Number `sink` of them is a score beside those of the positions, of a value 0."""
    total, weight_sum = state + m * dim * 4, read_float32(state + (count * (dim + 1) + m) * 4)
    faded = np.float32(1)
    if sinks != 0:
        score, top = read_float32(sinks + sink * 4) * _LOG2_E, read_float32(state + (count * dim + m) * 4)
        highest = max(score, top)
        faded = _power(top - highest)
        weight_sum = weight_sum * faded + _power(score - highest)
    for d in range(0, dim, 16):
        value = load_some(total + d * 4, dim - d, _F32)
        if sinks != 0:
            value = value * splat(faded)
        value = value / splat(weight_sum)
        store_some(value, out + d * size_of(like), dim - d, like)
