"""The two products of LoRA on a CPU, for a tile: up to ROWS adjacent rows of one adapter.

A row's sums have one order, whatever rows are beside it in the tile: each rank's product with x is sixteen sums over
the columns, added up by halves at the end, and what comes into a column of y comes rank by rank.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.lora.types import CHUNK
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import (
    fma,
    horizontal_sum,
    jit,
    load_some,
    size_of,
    splat,
    store_some,
)

ROWS = 4
_CHUNK = CHUNK  # numba takes no global of another module into what it caches
_TURN = 32
"""Columns of x that one turn of the loop reads: a pair."""
_F32 = np.float32(0)


def sums_in_registers(context) -> int:
    """How many vectors of sums there is room for, beside what they are made of."""
    return 24 if nir.wide_registers(context) else 4


def add_lanes(builder, vectors):
    """One vector, which begins with the sum of each vector's lanes; there are 1, 2, 4, 8 or 16. The lanes are added
    by halves, in the same order however many vectors there are."""
    distance = nir.LANES // 2
    while distance:
        low, high = (
            ir.Constant(nir.V_I32, [lane for lane in range(2 * nir.LANES) if bool(lane & distance) is odd])
            for odd in (False, True)
        )
        vectors = [
            builder.fadd(builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high))
            for a, b in zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        ]
        distance //= 2
    return vectors[0]


def bring_near(builder, address, size):
    """Prefetch `size` bytes that are read later. A tile is read in many short runs, which no processor foresees."""
    for line in range(0, size, 64):
        nir.prefetch(builder, builder.add(address, nir.i64(line)))


@intrinsic(prefer_literal=True)
def _products(typing, count, x, x_row, columns, a, ahead, hidden, hidden_row, x_like, like):
    """hidden[m, r] = x[m] · A[r] over the first whole turns of the columns, for `count` (a constant) rows.

    x: rows x_row bytes apart; a: [CHUNK, columns]; ahead: what is read next, of the same size; hidden: float32, rows
    hidden_row bytes apart. Returns the columns that were summed.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    rows = count.literal_value

    def lower(context, builder, signature, values):
        x_element, element = (nir.elements(context, kind) for kind in signature.args[-2:])
        # Pairs of bfloat16 cost less to take apart than vectors; of other dtypes they cost more.
        in_pairs = signature.args[-2] == signature.args[-1] == types.uint16
        _, x, x_row, columns, a, ahead, hidden, hidden_row, _, _ = values
        ranks = 1
        while 2 * ranks <= CHUNK and 2 * ranks * rows <= sums_in_registers(context):
            ranks *= 2
        whole = builder.and_(columns, nir.i64(-_TURN))
        a_row = builder.mul(columns, nir.i64(element.size))
        to_ahead = builder.sub(ahead, a)

        def turn_of(kind, row, k):
            address = builder.add(row, builder.mul(k, nir.i64(kind.size)))
            if in_pairs:
                return kind.load_pair(builder, address, None)
            there = builder.add(address, nir.i64(nir.LANES * kind.size))
            return kind.load(builder, address), kind.load(builder, there)

        def add_turn(total, weights, inputs):
            if in_pairs:
                return element.dot_pair(builder, total, inputs, weights)
            return nir.fma(builder, inputs[1], weights[1], nir.fma(builder, inputs[0], weights[0], total))

        def some_ranks(rank, _):
            x_rows = [builder.add(x, builder.mul(x_row, nir.i64(m))) for m in range(rows)]
            first = builder.add(a, builder.mul(a_row, rank))
            a_rows = [builder.add(first, builder.mul(a_row, nir.i64(r))) for r in range(ranks)]

            def one_turn(k, sums):
                inputs = [turn_of(x_element, row, k) for row in x_rows]
                following = []
                for r, row in enumerate(a_rows):
                    place = builder.add(row, builder.mul(k, nir.i64(element.size)))
                    bring_near(builder, builder.add(place, to_ahead), _TURN * element.size)
                    weights = turn_of(element, row, k)
                    mine = sums[r * rows : (r + 1) * rows]
                    following += [add_turn(s, weights, given) for s, given in zip(mine, inputs, strict=True)]
                return following

            zeros = [nir.vector(nir.V_F32, 0.0)] * (ranks * rows)
            sums = nir.loop(builder, whole, _TURN, zeros, one_turn)
            for m in range(rows):
                total = add_lanes(builder, sums[m::rows])
                kept = ir.Constant(ir.VectorType(nir.I32, ranks), list(range(ranks)))
                place = builder.add(hidden, builder.mul(hidden_row, nir.i64(m)))
                place = builder.add(place, builder.mul(rank, nir.i64(4)))
                nir.store(builder, builder.shuffle_vector(total, total, kept), place, 4)
            return []

        nir.loop(builder, nir.i64(CHUNK), ranks, [], some_ranks)
        return whole

    whole = types.int64
    return types.int64(count, *(whole,) * 7, x_like, like), lower


@intrinsic(prefer_literal=True)
def _updates(
    typing, count, hidden, hidden_row, tiles, ahead, num_tiles, width, vectors, y, y_row, y_like, like
):
    """y[m, n] (· g + c) + hidden[m] · B[:, n] into y, over the first whole turns of the columns, for `count` (a
    constant) rows.

    hidden: float32, rows hidden_row bytes apart; tiles, ahead: [num_tiles] int64, addresses of B tiles [CHUNK, width],
    of these and of those that are read next; vectors: address of g - 1 and c [2, width] float32, 0 where there are
    none; y: rows y_row bytes apart. Returns the columns that are done.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    rows = count.literal_value

    def lower(context, builder, signature, values):
        y_element, element = (nir.elements(context, kind) for kind in signature.args[-2:])
        _, hidden, hidden_row, tiles, ahead, num_tiles, width, vectors, y, y_row, _, _ = values
        parts = min(4, sums_in_registers(context) // rows)
        whole = builder.and_(width, nir.i64(-parts * nir.LANES))
        b_row = builder.mul(width, nir.i64(element.size))
        has_vectors = builder.zext(builder.icmp_signed("!=", vectors, nir.i64(0)), nir.I64)

        def at(row, column, part, size):
            place = builder.add(row, builder.mul(column, nir.i64(size)))
            return builder.add(place, nir.i64(part * nir.LANES * size))

        def some_columns(column, _):
            y_rows = [builder.add(y, builder.mul(y_row, nir.i64(m))) for m in range(rows)]
            places = [at(row, column, part, y_element.size) for row in y_rows for part in range(parts)]

            def scale_and_move(_, sums):
                second = builder.add(vectors, builder.mul(width, nir.i64(4)))
                g, c = (
                    [nir.load(builder, at(row, column, part, 4), nir.V_F32, 4) for part in range(parts)]
                    for row in (vectors, second)
                )
                return [
                    builder.fadd(value, nir.fma(builder, value, g[i % parts], c[i % parts]))
                    for i, value in enumerate(sums)
                ]

            def one_tile(tile, sums):
                b = nir.load(builder, builder.add(tiles, builder.mul(tile, nir.i64(8))), nir.I64, 8)
                near = nir.load(builder, builder.add(ahead, builder.mul(tile, nir.i64(8))), nir.I64, 8)
                first = builder.add(hidden, builder.mul(tile, nir.i64(4 * CHUNK)))
                for r in range(CHUNK):
                    row = builder.add(b, builder.mul(b_row, nir.i64(r)))
                    place = builder.add(near, builder.mul(b_row, nir.i64(r)))
                    bring_near(builder, at(place, column, 0, element.size), parts * nir.LANES * element.size)
                    weights = [
                        element.load(builder, at(row, column, part, element.size)) for part in range(parts)
                    ]
                    own = [builder.add(first, builder.mul(hidden_row, nir.i64(m))) for m in range(rows)]
                    factors = [
                        nir.splat(builder, nir.load(builder, builder.add(place, nir.i64(4 * r)), nir.F32, 4))
                        for place in own
                    ]
                    operands = [(factor, weight) for factor in factors for weight in weights]
                    sums = [
                        nir.fma(builder, *both, total) for both, total in zip(operands, sums, strict=True)
                    ]
                    nir.keep_loads_behind(builder)
                return sums

            if rows == ROWS:
                # The next tile's columns: in short runs, which no processor foresees.
                next_rows = builder.mul(y_row, nir.i64(rows))
                for row in y_rows:
                    place = builder.add(at(row, column, 0, y_element.size), next_rows)
                    bring_near(builder, place, parts * nir.LANES * y_element.size)
            sums = [y_element.load(builder, place) for place in places]
            sums = nir.loop(builder, has_vectors, 1, sums, scale_and_move)
            sums = nir.loop(builder, num_tiles, 1, sums, one_tile)
            for total, place in zip(sums, places, strict=True):
                y_element.store(builder, total, place)
            return []

        nir.loop(builder, whole, parts * nir.LANES, [], some_columns)
        return whole

    whole = types.int64
    return types.int64(count, *(whole,) * 9, y_like, like), lower


@jit
def shrink(rows, x, x_row, columns, a, ahead, hidden, first, x_like, like):
    """hidden[m, first + r] = x[m] · A[r], for `rows` ≤ ROWS rows and the CHUNK ranks of one tile.

    x: rows x_row bytes apart; a: address of [CHUNK, columns]; ahead: that of the tile of this size that is read next;
    hidden: [≥ rows, ranks] float32.
    """
    ranks = hidden.shape[1]
    target = hidden.ctypes.data + first * 4
    if rows == 1:
        done = _products(1, x, x_row, columns, a, ahead, target, ranks * 4, x_like, like)
    elif rows == 2:
        done = _products(2, x, x_row, columns, a, ahead, target, ranks * 4, x_like, like)
    elif rows == 3:
        done = _products(3, x, x_row, columns, a, ahead, target, ranks * 4, x_like, like)
    else:
        done = _products(4, x, x_row, columns, a, ahead, target, ranks * 4, x_like, like)
    if done == columns:
        return
    for m in range(rows):
        for r in range(_CHUNK):
            total = splat(_F32)
            for k in range(done, columns, 16):
                inputs = load_some(x + m * x_row + k * size_of(x_like), columns - k, x_like)
                weights = load_some(a + (r * columns + k) * size_of(like), columns - k, like)
                total = fma(inputs, weights, total)
            hidden[m, first + r] += horizontal_sum(total)


@jit
def expand(rows, hidden, tiles, ahead, num_tiles, width, vectors, y, y_row, y_like, like):
    """y[m] = y[m] (· g + c) + hidden[m] · B, rounded once, for `rows` ≤ ROWS rows of one site.

    hidden: [≥ rows, ranks] float32; tiles: [≥ num_tiles] int64, addresses of B tiles [CHUNK, width]; ahead: the same of
    the tiles that are read next; vectors: address of g - 1 and c [2, width] float32, 0 where there are none; y:
    address of the first row's columns of this site, rows y_row bytes apart.
    """
    ranks = hidden.shape[1]
    source, table, near = hidden.ctypes.data, tiles.ctypes.data, ahead.ctypes.data
    if rows == 1:
        done = _updates(1, source, ranks * 4, table, near, num_tiles, width, vectors, y, y_row, y_like, like)
    elif rows == 2:
        done = _updates(2, source, ranks * 4, table, near, num_tiles, width, vectors, y, y_row, y_like, like)
    elif rows == 3:
        done = _updates(3, source, ranks * 4, table, near, num_tiles, width, vectors, y, y_row, y_like, like)
    else:
        done = _updates(4, source, ranks * 4, table, near, num_tiles, width, vectors, y, y_row, y_like, like)
    for m in range(rows):
        for n in range(done, width, 16):
            left = width - n
            place = y + m * y_row + n * size_of(y_like)
            total = load_some(place, left, y_like)
            if vectors != 0:
                g = load_some(vectors + n * 4, left, _F32)
                c = load_some(vectors + (width + n) * 4, left, _F32)
                total = total + fma(total, g, c)
            for tile in range(num_tiles):
                for r in range(_CHUNK):
                    weights = load_some(tiles[tile] + (r * width + n) * size_of(like), left, like)
                    total = fma(splat(hidden[m, tile * _CHUNK + r]), weights, total)
            store_some(total, place, left, y_like)
