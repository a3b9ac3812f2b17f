"""The two products of LoRA on experts on a CPU, for up to four adjacent places of one adapter and one expert.

Ranks lie wherever their tiles do: tables have the address of each rank's row of A and of B, so heights of tiles make
no difference here. A row's sums have one order, whatever rows are beside it: each rank's product with x is sixteen sums
over the columns, added up by halves at the end, and what comes into a column of y comes rank by rank.

Most runs are of one row, so weights are read from memory once and seldom again. Some ranks are read side by side, each
line of them a constant distance ahead of its use.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.lora.numba_lora_tiles import add_lanes, bring_near, sums_in_registers
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

_SIDE_BY_SIDE = 4
"""Ranks of A that are read at once, at most."""
_A_AHEAD, _B_AHEAD = 1024, 256
"""Bytes of a rank's row from what is used to what is prefetched."""
_TURN = 32
"""Columns of x that one turn of the loop reads: a pair."""
_F32 = np.float32(0)


@intrinsic(prefer_literal=True)
def _products(typing, count, x, x_row, columns, ranks, a_rows, hidden, hidden_row, x_like, like):
    """hidden[m, r] = x[m] · A[r] over the first whole turns of the columns, for `count` (a constant) rows and all
    `ranks`.

    x: rows x_row bytes apart; a_rows: address of int64 [ranks], addresses of A's rows; hidden: float32, rows
    hidden_row bytes apart. Returns the columns that were summed.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    rows = count.literal_value

    def lower(context, builder, signature, values):
        x_element, element = (nir.elements(context, kind) for kind in signature.args[-2:])
        # Pairs of bfloat16 cost less to take apart than vectors; of other dtypes they cost more.
        in_pairs = signature.args[-2] == signature.args[-1] == types.uint16
        _, x, x_row, columns, ranks, a_rows, hidden, hidden_row, _, _ = values
        whole = builder.and_(columns, nir.i64(-_TURN))
        row_bytes = builder.mul(columns, nir.i64(element.size))

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

        def address_of(rank):
            return nir.load(builder, builder.add(a_rows, builder.mul(rank, nir.i64(8))), nir.I64, 8)

        def some_ranks(first, size):
            x_rows = [builder.add(x, builder.mul(x_row, nir.i64(m))) for m in range(rows)]
            own = [address_of(builder.add(first, nir.i64(r))) for r in range(size)]
            last = builder.sub(ranks, nir.i64(1))
            following = [builder.add(first, nir.i64(size + r)) for r in range(size)]
            there = [builder.icmp_signed("<", rank, ranks) for rank in following]
            following = [
                address_of(builder.select(flag, rank, last))
                for flag, rank in zip(there, following, strict=True)
            ]

            def one_turn(k, sums):
                inputs = [turn_of(x_element, row, k) for row in x_rows]
                done = builder.add(builder.mul(k, nir.i64(element.size)), nir.i64(_A_AHEAD))
                is_beyond = builder.icmp_signed(">=", done, row_bytes)
                beyond = builder.sub(done, row_bytes)
                made = []
                for r, row in enumerate(own):
                    near = builder.select(
                        is_beyond, builder.add(following[r], beyond), builder.add(row, done)
                    )
                    bring_near(builder, near, _TURN * element.size)
                    weights = turn_of(element, row, k)
                    mine = sums[r * rows : (r + 1) * rows]
                    made += [add_turn(s, weights, given) for s, given in zip(mine, inputs, strict=True)]
                return made

            zeros = [nir.vector(nir.V_F32, 0.0)] * (size * rows)
            sums = nir.loop(builder, whole, _TURN, zeros, one_turn)
            for m in range(rows):
                total = add_lanes(builder, sums[m::rows])
                kept = ir.Constant(ir.VectorType(nir.I32, size), list(range(size)))
                place = builder.add(hidden, builder.mul(hidden_row, nir.i64(m)))
                place = builder.add(place, builder.mul(first, nir.i64(4)))
                nir.store(builder, builder.shuffle_vector(total, total, kept), place, 4)
            return []

        size = _SIDE_BY_SIDE
        while size * rows > sums_in_registers(context):
            size //= 2
        grouped = builder.and_(ranks, nir.i64(-size))
        nir.loop(builder, grouped, size, [], lambda rank, _: some_ranks(rank, size))
        if size > 1:
            left = builder.sub(ranks, grouped)
            nir.loop(builder, left, 1, [], lambda rank, _: some_ranks(builder.add(grouped, rank), 1))
        return whole

    whole = types.int64
    return types.int64(count, *(whole,) * 7, x_like, like), lower


@intrinsic(prefer_literal=True)
def _updates(typing, count, hidden, hidden_row, ranks, b_rows, width, y, y_row, y_like, like):
    """y[m, n] += hidden[m] · B[:, n], over the first whole turns of the columns, for `count` (a constant) rows.

    hidden: float32, rows hidden_row bytes apart; b_rows: address of int64 [ranks], addresses of B's rows [width]; y:
    rows y_row bytes apart. Returns the columns that are done.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    rows = count.literal_value

    def lower(context, builder, signature, values):
        y_element, element = (nir.elements(context, kind) for kind in signature.args[-2:])
        _, hidden, hidden_row, ranks, b_rows, width, y, y_row, _, _ = values
        parts = min(4, sums_in_registers(context) // rows)
        whole = builder.and_(width, nir.i64(-parts * nir.LANES))

        def at(row, column, part, size):
            place = builder.add(row, builder.mul(column, nir.i64(size)))
            return builder.add(place, nir.i64(part * nir.LANES * size))

        def some_columns(column, _):
            y_rows = [builder.add(y, builder.mul(y_row, nir.i64(m))) for m in range(rows)]
            places = [at(row, column, part, y_element.size) for row in y_rows for part in range(parts)]

            def one_rank(rank, sums):
                row = nir.load(builder, builder.add(b_rows, builder.mul(rank, nir.i64(8))), nir.I64, 8)
                near = builder.add(at(row, column, 0, element.size), nir.i64(_B_AHEAD))
                bring_near(builder, near, parts * nir.LANES * element.size)
                weights = [
                    element.load(builder, at(row, column, part, element.size)) for part in range(parts)
                ]
                first = builder.add(hidden, builder.mul(rank, nir.i64(4)))
                own = [builder.add(first, builder.mul(hidden_row, nir.i64(m))) for m in range(rows)]
                factors = [nir.splat(builder, nir.load(builder, place, nir.F32, 4)) for place in own]
                operands = [(factor, weight) for factor in factors for weight in weights]
                return [nir.fma(builder, *both, total) for both, total in zip(operands, sums, strict=True)]

            sums = [y_element.load(builder, place) for place in places]
            sums = nir.loop(builder, ranks, 1, sums, one_rank)
            for total, place in zip(sums, places, strict=True):
                y_element.store(builder, total, place)
            return []

        nir.loop(builder, whole, parts * nir.LANES, [], some_columns)
        return whole

    whole = types.int64
    return types.int64(count, *(whole,) * 7, y_like, like), lower


@jit
def shrink(rows, x, x_row, columns, ranks, a_rows, hidden, x_like, like):
    """hidden[m, r] = x[m] · A[r], for `rows` ≤ 4 rows.

    x: rows x_row bytes apart; a_rows: [≥ ranks] int64, addresses of A's rows [columns]; hidden: [≥ rows, ≥ ranks]
    float32.
    """
    table, target, step = a_rows.ctypes.data, hidden.ctypes.data, hidden.shape[1] * 4
    if rows == 1:
        done = _products(1, x, x_row, columns, ranks, table, target, step, x_like, like)
    elif rows == 2:
        done = _products(2, x, x_row, columns, ranks, table, target, step, x_like, like)
    elif rows == 3:
        done = _products(3, x, x_row, columns, ranks, table, target, step, x_like, like)
    else:
        done = _products(4, x, x_row, columns, ranks, table, target, step, x_like, like)
    if done == columns:
        return
    for m in range(rows):
        for r in range(ranks):
            total = splat(_F32)
            for k in range(done, columns, 16):
                inputs = load_some(x + m * x_row + k * size_of(x_like), columns - k, x_like)
                weights = load_some(a_rows[r] + k * size_of(like), columns - k, like)
                total = fma(inputs, weights, total)
            hidden[m, r] += horizontal_sum(total)


@jit
def expand(rows, hidden, ranks, b_rows, width, y, y_row, y_like, like):
    """y[m] += hidden[m] · B, rounded once, for `rows` ≤ 4 rows.

    hidden: [≥ rows, ≥ ranks] float32; b_rows: [≥ ranks] int64, addresses of B's rows [width]; y: address of the first
    row's columns, rows y_row bytes apart.
    """
    table, source, step = b_rows.ctypes.data, hidden.ctypes.data, hidden.shape[1] * 4
    if rows == 1:
        done = _updates(1, source, step, ranks, table, width, y, y_row, y_like, like)
    elif rows == 2:
        done = _updates(2, source, step, ranks, table, width, y, y_row, y_like, like)
    elif rows == 3:
        done = _updates(3, source, step, ranks, table, width, y, y_row, y_like, like)
    else:
        done = _updates(4, source, step, ranks, table, width, y, y_row, y_like, like)
    for m in range(rows):
        for n in range(done, width, 16):
            place = y + m * y_row + n * size_of(y_like)
            total = load_some(place, width - n, y_like)
            for r in range(ranks):
                weights = load_some(b_rows[r] + n * size_of(like), width - n, like)
                total = fma(splat(hidden[m, r]), weights, total)
            store_some(total, place, width - n, y_like)


@intrinsic
def _prefetch(typing, address, num_bytes):
    """The cache lines of `num_bytes` from an address on."""

    def lower(context, builder, signature, values):
        address, num_bytes = values

        def one_line(offset, _):
            nir.prefetch(builder, builder.add(address, offset))
            return []

        nir.loop(builder, num_bytes, 64, [], one_line)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@jit
def prefetch_a(a_rows, ranks, row_bytes):
    """Prefetch the first columns that `shrink` reads."""
    for r in range(min(ranks, _SIDE_BY_SIDE)):
        _prefetch(a_rows[r], min(row_bytes, _A_AHEAD))


@jit
def prefetch_b(b_rows, ranks, row_bytes):
    """Prefetch the first columns that `expand` reads."""
    for r in range(ranks):
        _prefetch(b_rows[r], min(row_bytes, _B_AHEAD))
