"""The products of attention on a CPU: of query vectors with keys, and of weights with values.

A score is summed pair of dimensions by pair of dimensions, a value's sum pair of positions by pair of positions, each
in one chain. What is computed at once is several query vectors and several blocks or columns, never a part of a sum: so
the bits do not depend on how many query vectors there are.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from loraplex.kernels.attention.kv_codes import SCALE_BYTES
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import jit, size_of

BLOCK = 16
SEGMENT = 128
"""Positions between two looks at the running maximum: what of K and V stays in the first cache meanwhile."""
BLOCKS_AT_ONCE = 8
"""The most blocks of keys that are computed at once: a list of blocks is filled up to a multiple of it."""


@intrinsic
def wide_registers(typing):
    """`numba_runtime.ir.wide_registers`."""

    def lower(context, builder, signature, values):
        return nir.flag(nir.wide_registers(context))

    return types.boolean(), lower


@intrinsic
def factor_size_of(typing, like):
    """Bytes of an element of the other factor of a product."""

    def lower(context, builder, signature, values):
        return nir.i64(nir.elements(context, signature.args[0]).factor_size)

    return types.int64(like), lower


@intrinsic
def column_size_of(typing, like):
    """Bytes from one column of a pair to the next."""

    def lower(context, builder, signature, values):
        return nir.i64(nir.elements(context, signature.args[0]).column_size)

    return types.int64(like), lower


@intrinsic
def is_codes(typing, like):
    """Whether K and V are codes with scales."""

    def lower(context, builder, signature, values):
        return nir.flag(signature.args[0] == types.int8)

    return types.boolean(like), lower


@jit
def head_bytes_of(dim, like):
    """K and V of one KV head in a block, and the scales that lie behind codes."""
    return 2 * BLOCK * (dim * size_of(like) + (SCALE_BYTES if is_codes(like) else 0))


@intrinsic(prefer_literal=True)
def _scores(typing, count, together, q, dim, blocks, num_blocks, scores, like):
    """scores[m, 16·j + i] = q[m] · K_j[:, i], for `count` vectors, `together` blocks at a time (constants).

    q: [count, dim]; blocks: [num_blocks] int64, addresses of K by pairs: [dim/2, 16, 2], or [dim/2, 2, 16] for
    float32 and codes; scores: float32, SEGMENT a row. num_blocks is rounded up to a multiple of `together`.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(together, types.IntegerLiteral):
        return None
    rows, width = count.literal_value, together.literal_value

    def lower(context, builder, signature, values):
        element = nir.elements(context, signature.args[-1])
        _, _, q, dim, blocks, num_blocks, scores, _ = values
        pairs = builder.lshr(dim, nir.i64(1))
        row_bytes = builder.mul(dim, nir.i64(element.factor_size))
        queries = [builder.add(q, builder.mul(row_bytes, nir.i64(row))) for row in range(rows)]
        key_bytes = builder.mul(dim, nir.i64(BLOCK * element.size))

        def some_blocks(j, _):
            first = builder.add(blocks, builder.mul(j, nir.i64(8)))
            keys = [nir.load(builder, builder.add(first, nir.i64(8 * b)), nir.I64, 8) for b in range(width)]

            def add_pair(pair, sums):
                at = builder.mul(pair, nir.i64(2 * BLOCK * element.size))
                offset = builder.mul(pair, nir.i64(2 * element.factor_size))
                own = [element.splat_pair(builder, builder.add(query, offset)) for query in queries]
                following = []
                for b, key in enumerate(keys):
                    column = element.load_pair(
                        builder, builder.add(key, at), nir.i64(element.column_size * BLOCK)
                    )
                    if rows < 4:
                        # With so few vectors memory is what takes the time: the block's V lies behind its K.
                        ahead = builder.add(builder.add(key, at), key_bytes)
                        for line in range(0, 2 * BLOCK * element.size, 64):
                            nir.prefetch(builder, builder.add(ahead, nir.i64(line)))
                    mine = sums[b * rows : (b + 1) * rows]
                    following += [
                        element.dot_pair(builder, total, query, column)
                        for total, query in zip(mine, own, strict=True)
                    ]
                return following

            sums = nir.loop(builder, pairs, 1, [nir.vector(nir.V_F32, 0.0)] * (rows * width), add_pair)
            for number, total in enumerate(sums):
                block, row = divmod(number, rows)
                place = builder.add(builder.mul(j, nir.i64(4 * BLOCK)), scores)
                offset = nir.i64(4 * (BLOCK * block + SEGMENT * row))
                nir.store(builder, total, builder.add(place, offset), 4)
            return []

        nir.loop(builder, num_blocks, width, [], some_blocks)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(count, together, whole, whole, whole, whole, whole, like), lower


@intrinsic(prefer_literal=True)
def _values(typing, count, chunks, weights, pairs, num_pairs, offset, dim, total, faded, columns, like):
    """total[m, c] = total[m, c] · faded[m] + Σ_j weights[m, j] · V[j, c], for `count` vectors and 16·`chunks` columns,
    both constants; where chunks is 0, for the first `columns` ≤ 16.

    weights: SEGMENT elements a row; pairs: [num_pairs] int64, addresses of pairs of positions of V, in which those
    columns begin `offset` bytes on: [dim, 2], or [2, dim] for float32 and codes; total: [count, dim] float32 from those
    columns on; faded: [count] float32.
    """
    if not isinstance(count, types.IntegerLiteral) or not isinstance(chunks, types.IntegerLiteral):
        return None
    rows, wide = count.literal_value, chunks.literal_value

    def lower(context, builder, signature, values):
        element = nir.elements(context, signature.args[-1])
        f32 = nir.elements(context, types.float32)
        _, _, weights, pairs, num_pairs, offset, dim, total, faded, columns, _ = values
        mask = None if wide else nir.lane_mask(builder, nir.i64(0), columns)
        row_bytes = builder.mul(dim, nir.i64(4))
        chunk_bytes = 16 * element.column_size
        second = builder.mul(dim, nir.i64(element.column_size))
        places = [
            builder.add(builder.add(total, builder.mul(row_bytes, nir.i64(row))), nir.i64(64 * chunk))
            for row in range(rows)
            for chunk in range(wide or 1)
        ]

        def add_pair(j, sums):
            v = nir.load(builder, builder.add(pairs, builder.mul(j, nir.i64(8))), nir.I64, 8)
            v = builder.add(v, offset)
            value = [
                element.load_pair(builder, builder.add(v, nir.i64(chunk_bytes * chunk)), second, mask)
                for chunk in range(wide or 1)
            ]
            weight = []
            for row in range(rows):
                at = builder.add(
                    builder.mul(j, nir.i64(2 * element.factor_size)),
                    nir.i64(row * SEGMENT * element.factor_size),
                )
                weight.append(element.splat_pair(builder, builder.add(weights, at)))
            operands = [(a, b) for a in weight for b in value]
            return [
                element.dot_pair(builder, part, a, b) for part, (a, b) in zip(sums, operands, strict=True)
            ]

        factors = [
            nir.splat(builder, nir.load(builder, builder.add(faded, nir.i64(4 * row)), nir.F32, 4))
            for row in range(rows)
            for _ in range(wide or 1)
        ]
        sums = [
            builder.fmul(f32.load(builder, place, mask), factor)
            for place, factor in zip(places, factors, strict=True)
        ]
        sums = nir.loop(builder, num_pairs, 1, sums, add_pair)
        for place, value in zip(places, sums, strict=True):
            f32.store(builder, value, place, mask)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(count, chunks, *(whole,) * 8, like), lower


@jit
def all_scores(count, q, dim, blocks, num_blocks, scores, like):
    """scores[m, 16·j + i] = q[m] · K_j[:, i], for `count` vectors.

    q: address of [count, dim]; blocks: address of [num_blocks] int64, of K's blocks, filled up with any other one's
    address to a multiple of BLOCKS_AT_ONCE; scores: address of [count, SEGMENT] float32. What is written behind the
    scores of `num_blocks` blocks means nothing.
    """
    m = 0
    while m < count:
        at, there, left = q + m * dim * factor_size_of(like), scores + m * SEGMENT * 4, count - m
        if not wide_registers():
            if left >= 2:
                _scores(2, 2, at, dim, blocks, num_blocks, there, like)
                m += 2
            else:
                _scores(1, 4, at, dim, blocks, num_blocks, there, like)
                m += 1
        elif left >= 4:
            # A prompt's last blocks are not rounded up to four: half of its tiles would compute two for nothing.
            whole = num_blocks - num_blocks % 4
            _scores(4, 4, at, dim, blocks, whole, there, like)
            if num_blocks - whole >= 3:
                _scores(4, 4, at, dim, blocks + whole * 8, 4, there + whole * BLOCK * 4, like)
            elif num_blocks > whole:
                _scores(4, 2, at, dim, blocks + whole * 8, 2, there + whole * BLOCK * 4, like)
            m += 4
        elif left == 3:
            _scores(3, 4, at, dim, blocks, num_blocks, there, like)
            m += 3
        elif left == 2:
            _scores(2, 4, at, dim, blocks, num_blocks, there, like)
            m += 2
        else:
            _scores(1, 8, at, dim, blocks, num_blocks, there, like)
            m += 1


@jit
def all_values(count, weights, pairs, num_pairs, dim, total, faded, like):
    """total[m] = total[m] · faded[m] + Σ_j weights[m, j] · V[j], for `count` vectors.

    weights: address of [count, SEGMENT] elements; pairs: address of [num_pairs] int64, of pairs of positions of V;
    total: address of [count, dim] float32; faded: of [count].
    """
    column = 0
    while column < dim:
        left = dim - column
        step = 16
        if left >= 64 and wide_registers():
            step = 64
        elif left >= 32:
            step = 32
        # Of a pair in 16 bits the columns lie side by side, of others row by row.
        offset = column * column_size_of(like)
        m = 0
        while m < count:
            at, there = weights + m * SEGMENT * factor_size_of(like), total + (m * dim + column) * 4
            rows, fades = count - m, faded + m * 4
            if step == 64 and rows >= 4:
                _values(4, 4, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 4
            elif step == 64 and rows == 3:
                _values(3, 4, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 3
            elif step == 64 and rows == 2:
                _values(2, 4, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 2
            elif step == 64:
                _values(1, 4, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 1
            elif step == 32 and rows >= 2:
                _values(2, 2, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 2
            elif step == 32:
                _values(1, 2, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 1
            elif rows >= 2:
                _values(2, 0, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 2
            else:
                _values(1, 0, at, pairs, num_pairs, offset, dim, there, fades, left, like)
                m += 1
        column += step
