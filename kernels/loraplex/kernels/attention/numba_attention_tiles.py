"""The inner products of attention on a CPU, and the way of one unit of work through them.

A unit is some rows of one sequence, the query heads that share one KV head, and a span of positions. Its M = rows ·
heads query vectors go through the span in segments: scores of a segment, the running softmax (Milakov and Gimelshein,
2018; Dao et al., 2022), its share of the sum of values.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import (
    copy_element,
    exp,
    horizontal_max,
    horizontal_sum,
    jit,
    keep_lanes,
    load,
    load_some,
    maximum,
    read_int32,
    size_of,
    splat,
    store,
    store_some,
    tanh,
)

BLOCK = 16
SEGMENT = 128
"""Positions between two looks at the running maximum: what of K and V stays in the first cache meanwhile."""

_F32 = np.float32(0)
_LOWEST = np.float32(-3e38)  # finite: -inf less -inf is NaN
_HIDDEN = np.float32(-math.inf)


@intrinsic
def wide_registers(typing):
    """`numba_runtime.ir.wide_registers`."""

    def lower(context, builder, signature, values):
        return nir.flag(nir.wide_registers(context))

    return types.boolean(), lower


@intrinsic(prefer_literal=True)
def _scores(typing, count, q, dim, blocks, num_blocks, scores, like):
    """scores[m, 16·j + i] = q[m] · K_j[:, i], for `count` (a constant) vectors.

    q: [count, dim]; blocks: [num_blocks] int64, addresses of K by pairs: [dim/2, 16, 2], or [dim/2, 2, 16] for
    float32; scores: float32, SEGMENT a row.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    rows = count.literal_value

    def lower(context, builder, signature, values):
        element = nir.elements(context, signature.args[-1])
        _, q, dim, blocks, num_blocks, scores, _ = values
        zero = nir.vector(nir.V_F32, 0.0)
        pairs = builder.lshr(dim, nir.i64(1))
        row_bytes = builder.mul(dim, nir.i64(element.size))
        queries = [builder.add(q, builder.mul(row_bytes, nir.i64(row))) for row in range(rows)]
        # Two chains of sums where one would wait for itself.
        chains = 2 if rows <= 4 else 1

        def one_block(j, _):
            k = nir.load(builder, builder.add(blocks, builder.mul(j, nir.i64(8))), nir.I64, 8)

            def add_pair(pair, sums):
                at = builder.mul(pair, nir.i64(2 * BLOCK * element.size))
                key = element.load_pair(builder, builder.add(k, at), nir.i64(4 * BLOCK))
                offset = builder.mul(pair, nir.i64(2 * element.size))
                return [
                    element.dot_pair(
                        builder, total, element.splat_pair(builder, builder.add(query, offset)), key
                    )
                    for total, query in zip(sums, queries, strict=True)
                ]

            def two_pairs(pair, sums):
                first = add_pair(pair, sums[:rows])
                if chains == 1:
                    return add_pair(builder.add(pair, nir.i64(1)), first)
                return first + add_pair(builder.add(pair, nir.i64(1)), sums[rows:])

            even = builder.and_(pairs, nir.i64(-2))
            sums = nir.loop(builder, even, 2, [zero] * (rows * chains), two_pairs)
            last = nir.loop(
                builder,
                builder.and_(pairs, nir.i64(1)),
                1,
                sums[:rows],
                lambda _, carried: add_pair(even, carried),
            )
            if chains == 2:
                last = [builder.fadd(a, b) for a, b in zip(last, sums[rows:], strict=True)]
            for row, total in enumerate(last):
                place = builder.add(builder.mul(j, nir.i64(4 * BLOCK)), nir.i64(4 * SEGMENT * row))
                nir.store(builder, total, builder.add(scores, place), 4)
            return []

        nir.loop(builder, num_blocks, 1, [], one_block)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(count, whole, whole, whole, whole, whole, like), lower


@intrinsic(prefer_literal=True)
def _values(typing, count, chunks, weights, pairs, num_pairs, dim, total, columns, like):
    """total[m, c] += Σ_j weights[m, j] · V[j, c], for `count` vectors and 16·`chunks` columns, both constants; where
    chunks is 0, for the first `columns` ≤ 16.

    weights: SEGMENT elements a row; pairs: [num_pairs] int64, addresses of those columns in V by pairs of positions:
    [dim, 2], or [2, dim] for float32; total: [count, dim] float32 from those columns on.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(chunks, types.IntegerLiteral):
        return None
    rows, wide = count.literal_value, chunks.literal_value

    def lower(context, builder, signature, values):
        element = nir.elements(context, signature.args[-1])
        f32 = nir.elements(context, types.float32)
        _, _, weights, pairs, num_pairs, dim, total, columns, _ = values
        mask = None if wide else nir.lane_mask(builder, nir.i64(0), columns)
        row_bytes = builder.mul(dim, nir.i64(4))
        places = [
            builder.add(builder.add(total, builder.mul(row_bytes, nir.i64(row))), nir.i64(64 * chunk))
            for row in range(rows)
            for chunk in range(wide or 1)
        ]

        def add_pair(j, sums):
            v = nir.load(builder, builder.add(pairs, builder.mul(j, nir.i64(8))), nir.I64, 8)
            value = [
                element.load_pair(builder, builder.add(v, nir.i64(64 * chunk)), row_bytes, mask)
                for chunk in range(wide or 1)
            ]
            weight = []
            for row in range(rows):
                at = builder.add(
                    builder.mul(j, nir.i64(2 * element.size)), nir.i64(row * SEGMENT * element.size)
                )
                weight.append(element.splat_pair(builder, builder.add(weights, at)))
            operands = [(a, b) for a in weight for b in value]
            return [
                element.dot_pair(builder, part, a, b) for part, (a, b) in zip(sums, operands, strict=True)
            ]

        sums = [f32.load(builder, place, mask) for place in places]
        sums = nir.loop(builder, num_pairs, 1, sums, add_pair)
        for place, value in zip(places, sums, strict=True):
            f32.store(builder, value, place, mask)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(count, chunks, whole, whole, whole, whole, whole, whole, like), lower


@jit
def _all_scores(count, q, dim, blocks, num_blocks, scores, like):
    m = 0
    while m < count:
        at, there, left = q + m * dim * size_of(like), scores + m * SEGMENT * 4, count - m
        if wide_registers() and left >= 8:
            _scores(8, at, dim, blocks, num_blocks, there, like)
            m += 8
        elif wide_registers() and left >= 4:
            _scores(4, at, dim, blocks, num_blocks, there, like)
            m += 4
        elif wide_registers() and left == 3:
            _scores(3, at, dim, blocks, num_blocks, there, like)
            m += 3
        elif left >= 2:
            _scores(2, at, dim, blocks, num_blocks, there, like)
            m += 2
        else:
            _scores(1, at, dim, blocks, num_blocks, there, like)
            m += 1


@jit
def _all_values(count, weights, pairs, num_pairs, dim, total, like):
    """`pairs` is moved from column to column."""
    column = 0
    while column < dim:
        left = dim - column
        step = 16
        if left >= 64 and wide_registers():
            step = 64
        elif left >= 32:
            step = 32
        m = 0
        while m < count:
            at, there = weights + m * SEGMENT * size_of(like), total + (m * dim + column) * 4
            address = pairs.ctypes.data
            rows = count - m
            if step == 64 and rows >= 4:
                _values(4, 4, at, address, num_pairs, dim, there, left, like)
                m += 4
            elif step == 64 and rows == 3:
                _values(3, 4, at, address, num_pairs, dim, there, left, like)
                m += 3
            elif step == 64 and rows == 2:
                _values(2, 4, at, address, num_pairs, dim, there, left, like)
                m += 2
            elif step == 64:
                _values(1, 4, at, address, num_pairs, dim, there, left, like)
                m += 1
            elif step == 32 and rows >= 2:
                _values(2, 2, at, address, num_pairs, dim, there, left, like)
                m += 2
            elif step == 32:
                _values(1, 2, at, address, num_pairs, dim, there, left, like)
                m += 1
            elif rows >= 2:
                _values(2, 0, at, address, num_pairs, dim, there, left, like)
                m += 2
            else:
                _values(1, 0, at, address, num_pairs, dim, there, left, like)
                m += 1
        for j in range(num_pairs):
            pairs[j] += 4 * step
        column += step


@jit
def _softmax_row(scores, num_blocks, first, last, scale, softcap, top, weights, like):
    """The weights exp(s - new top) of the positions first … last-1 of a segment, 0 elsewhere. Returns the new top and
    the weights' sum."""
    highest = splat(_LOWEST)
    for block in range(num_blocks):
        at = scores + block * 64
        s = load(at, _F32) * splat(scale)
        if softcap != 0.0:
            s = tanh(s / splat(softcap)) * splat(softcap)
        start = block * BLOCK
        if start < first or start + BLOCK > last:
            s = keep_lanes(s, first - start, last - start, _HIDDEN)
        store(s, at, _F32)
        highest = maximum(s, highest)
    top = max(top, horizontal_max(highest))
    total = splat(_F32)
    for block in range(num_blocks):
        e = exp(load(scores + block * 64, _F32) - splat(top))
        total = total + e
        store(e, weights + block * BLOCK * size_of(like), like)
    return top, horizontal_sum(total)


@jit
def _clear(row, count):
    for d in range(0, count, 16):
        store_some(splat(_F32), row + d * 4, count - d, _F32)


@jit
def _scale_row(row, dim, factor):
    for d in range(0, dim, 16):
        at, left = row + d * 4, dim - d
        store_some(load_some(at, left, _F32) * splat(factor), at, left, _F32)


@jit
def _edge_pair(source, target, dim, odd, like):
    """A pair of positions with zeros for one of them: only the other may be read."""
    size = size_of(like)
    _clear(target, 2 * dim * size // 4)
    step = size if size == 4 else 2 * size
    at = odd * (dim * size if size == 4 else size)
    for d in range(dim):
        copy_element(target + at + d * step, source + at + d * step, like)
    return target


@jit
def _find(keys, pairs, edges, cache, block_bytes, head, dim, table, segment, num_blocks, low, high, like):
    """The addresses of a segment's blocks of K and of its pairs of positions of V; low … high-1 are seen.
    Returns the first pair's number in the segment, and how many there are."""
    half = BLOCK * dim * size_of(like)
    pair_bytes = 2 * dim * size_of(like)
    first_pair, end_pair = (low - segment) // 2, (high - segment + 1) // 2
    for block in range(num_blocks):
        number = read_int32(table + (segment // BLOCK + block) * 4)
        k = cache + number * block_bytes + head * 2 * half
        keys[block] = k
        for pair in range(max(first_pair, block * 8), min(end_pair, block * 8 + 8)):
            pairs[pair - first_pair] = k + half + (pair - block * 8) * pair_bytes
    count = end_pair - first_pair
    if (low - segment) % 2 == 1:
        pairs[0] = _edge_pair(pairs[0], edges, dim, 1, like)
    if (high - segment) % 2 == 1:
        # One position alone that is odd has no even one at its side: low is even where the two are one.
        pairs[count - 1] = _edge_pair(pairs[count - 1], edges + pair_bytes, dim, 0, like)
    return first_pair, count


@jit
def attend(
    q,
    scores,
    weights,
    totals,
    tops,
    sums,
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
    like,
):
    """One unit: totals [M, dim], tops [M] and sums [M] of the positions low … high-1, for the gathered query vectors q
    [M, dim], M = rows·group; those of row r stand at position + r."""
    count = rows * group
    for m in range(count):
        tops[m] = _LOWEST
        sums[m] = 0.0
        _clear(totals + m * dim * 4, dim)
    segment = low // BLOCK * BLOCK
    while segment < high:
        end = min(high, segment + SEGMENT)
        start = max(low, segment)
        num_blocks = (end - segment + BLOCK - 1) // BLOCK
        first_pair, num_pairs = _find(
            keys, pairs, edges, cache, block_bytes, head, dim, table, segment, num_blocks, start, end, like
        )
        _all_scores(count, q, dim, keys.ctypes.data, num_blocks, scores, like)
        for m in range(count):
            at = position + m // group
            first = start if window < 0 else max(start, at - window + 1)
            old = tops[m]
            top, total = _softmax_row(
                scores + m * SEGMENT * 4,
                num_blocks,
                first - segment,
                min(end, at + 1) - segment,
                scale,
                softcap,
                old,
                weights + m * SEGMENT * size_of(like),
                like,
            )
            if top > old:
                factor = math.exp(old - top)
                sums[m] *= factor
                _scale_row(totals + m * dim * 4, dim, factor)
            tops[m] = top
            sums[m] += total
        _all_values(count, weights + 2 * first_pair * size_of(like), pairs, num_pairs, dim, totals, like)
        segment += SEGMENT
