"""The gated delta rule and Mamba-2's on a CPU, compiled by numba: `rule` of
`loraplex.kernels.recurrent.torch_recurrent`.

A unit of work is a key head of a sequence. Columns of a state do not depend on each other: 32 of them are read for all
rows of a window, their rows computed one after the other, and folded, while they lie in the nearest cache. All sums
have an order that the position alone decides, so a row has the same bits in any step.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    at_least,
    fma,
    horizontal_sum,
    jit,
    keep_lanes,
    load,
    read_float32,
    read_int64,
    size_of,
    splat,
    store,
    write_float32,
)
from loraplex.kernels.recurrent import COLUMNS, HEADER_BYTES, SMALLEST, UNIT_BYTES, WINDOW
from loraplex.kernels.recurrent.types import RecurrentHeads, RecurrentMemory, RecurrentRows, check_operands

_F32, _ONE, _SMALLEST = np.float32(0), np.float32(1), np.float32(SMALLEST)
_EPS = np.float32(1e-6)
_STRIP = COLUMNS * 4
"""Bytes of 32 columns of one row."""
_LANES = WINDOW * 4
_AHEAD = 2048
"""Bytes of a state that are asked for before they are read."""


def rule(
    x: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rows: RecurrentRows,
    memory: RecurrentMemory,
    heads: RecurrentHeads,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the module. Raises ValueError where the tensors do not fit."""
    check_operands(x, decay, beta, skip, heads)
    out = torch.empty(len(x), heads.value_heads * heads.value_dim, dtype=x.dtype)
    _all_units.run(
        (LIKE[x.dtype],),
        rows.address,
        x.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        out.data_ptr(),
        heads.key_heads,
        heads.value_heads // heads.key_heads,
        heads.key_dim,
        heads.value_dim,
        memory.states.data_ptr(),
        memory.states.stride(0) * 4,
        memory.keys.data_ptr(),
        memory.updates.data_ptr(),
        memory.decays.data_ptr(),
        memory.keys.stride(0) * 4,
        0 if skip is None else skip.data_ptr(),
        *(place * x.element_size() for place in heads.first_columns(delta=skip is None)),
    )
    return out


def _sums(builder, rows, vectors, depth, left, left_row, left_step, right, right_row, start, ahead):
    """start[m][n] + Σₖ left[m, k]·right[k, 16·n …] for `rows` m and `vectors` n, k in order: strides are in bytes."""

    def add(k, totals):
        at = builder.add(right, builder.mul(k, nir.i64(right_row)))
        if ahead:
            for line in range(0, vectors * 64, 64):
                nir.prefetch(builder, builder.add(at, nir.i64(ahead + line)))
        parts = [nir.load(builder, builder.add(at, nir.i64(64 * n)), nir.V_F32, 4) for n in range(vectors)]
        own = builder.add(left, builder.mul(k, left_step))
        added = []
        for m in range(rows):
            place = builder.add(own, builder.mul(left_row, nir.i64(m)))
            factor = nir.splat(builder, nir.load(builder, place, nir.F32, 4))
            added += [nir.fma(builder, factor, parts[n], totals[m * vectors + n]) for n in range(vectors)]
        return added

    return nir.loop(builder, depth, 1, start, add)


@intrinsic
def _read_columns(typing, columns, left, out, depth, count):
    """out[m, 32] = Σₖ left[m, k]·columns[k, 32] for an even number `count` of rows m, all side by side."""

    def lower(context, builder, signature, values):
        columns, left, out, depth, count = values
        left_row = builder.mul(depth, nir.i64(4))

        def tile(rows, ahead):
            def compute(m, nothing):
                own = builder.add(left, builder.mul(m, left_row))
                zeros = [nir.vector(nir.V_F32, 0.0)] * (2 * rows)
                totals = _sums(
                    builder, rows, 2, depth, own, left_row, nir.i64(4), columns, _STRIP, zeros, ahead
                )
                to = builder.add(out, builder.mul(m, nir.i64(_STRIP)))
                for number, total in enumerate(totals):
                    nir.store(builder, total, builder.add(to, nir.i64(64 * number)), 4)
                return nothing

            return compute

        many = 8 if nir.wide_registers(context) else 2
        whole = builder.mul(builder.sdiv(count, nir.i64(many)), nir.i64(many))
        if many > 2:
            nir.loop(builder, whole, many, [], tile(many, 0))
            rest = builder.sub(count, whole)
            left = builder.add(left, builder.mul(whole, left_row))
            out = builder.add(out, builder.mul(whole, nir.i64(_STRIP)))
        else:
            rest = count
        nir.loop(builder, rest, 2, [], tile(2, _AHEAD))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), lower


@intrinsic
def _fold_columns(typing, columns, target, own, left, updates, depth):
    """target[k, 32] = own·columns[k, 32] + Σᵢ left[i, k]·updates[i, 32] for `depth` rows k, a multiple of 8."""

    def lower(context, builder, signature, values):
        columns, target, own, left, updates, depth = values
        factor, left_step = nir.splat(builder, own), builder.mul(depth, nir.i64(4))
        many = 8 if nir.wide_registers(context) else 2

        def compute(k, nothing):
            offset = builder.mul(k, nir.i64(_STRIP))
            places = [nir.i64(64 * number) for number in range(2 * many)]
            source, to = builder.add(columns, offset), builder.add(target, offset)
            start = [
                builder.fmul(factor, nir.load(builder, builder.add(source, place), nir.V_F32, 4))
                for place in places
            ]
            here = builder.add(left, builder.mul(k, nir.i64(4)))
            depth_of = nir.i64(WINDOW)
            totals = _sums(builder, many, 2, depth_of, here, nir.i64(4), left_step, updates, _STRIP, start, 0)
            for place, total in zip(places, totals, strict=True):
                nir.store(builder, total, builder.add(to, place), 4)
            return nothing

        nir.loop(builder, depth, many, [], compute)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, *[types.int64] * 3), lower


@intrinsic
def _bring_near(typing, address, count):
    """Prefetch `count` bytes."""

    def lower(context, builder, signature, values):
        def bring(at, nothing):
            nir.prefetch(builder, builder.add(values[0], at))
            return nothing

        nir.loop(builder, values[1], 64, [], bring)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@jit
def _unit_length(source, target, dim, scale, like):
    squares = splat(_F32)
    for d in range(0, dim, 16):
        value = load(source + d * size_of(like), like)
        squares = fma(value, value, squares)
    factor = splat(_ONE / np.float32(math.sqrt(horizontal_sum(squares) + _EPS)))
    for d in range(0, dim, 16):
        store(load(source + d * size_of(like), like) * factor * splat(scale), target + d * 4, _F32)


@jit
def _as_it_is(source, target, dim, like):
    for d in range(0, dim, 16):
        store(load(source + d * size_of(like), like), target + d * 4, _F32)


@jit
def _products(window_keys, key, query, count, dim, by_key, by_query):
    """Products of a row's key and query with the first `count` keys of the window, the row's own the last of them."""
    for i in range(count):
        at = window_keys + i * dim * 4
        of_key, of_query = splat(_F32), splat(_F32)
        for d in range(0, dim, 16):
            own = load(at + d * 4, _F32)
            of_key = fma(own, load(key + d * 4, _F32), of_key)
            of_query = fma(own, load(query + d * 4, _F32), of_query)
        write_float32(horizontal_sum(of_key), by_key + i * 4)
        write_float32(horizontal_sum(of_query), by_query + i * 4)


@jit
def _kept(coefficient):
    return _F32 if coefficient < _SMALLEST else coefficient


@jit
def _coefficients(
    first, count, given, given_row, decays, by_key, by_query, owns, by_key_of, by_query_of, lasts
):
    """Coefficients of each new row of a window: the state's, and the products with keys before it times theirs.
    Behind the last row all of them are kept in `lasts`, and the state's is returned."""
    own, behind, least = _ONE, splat(_ONE), splat(_SMALLEST)
    for i in range(first + count):
        row = i - first
        if row >= 0:
            write_float32(read_float32(given + read_int64(given_row + row * 8)), decays + i * 4)
        decay = read_float32(decays + i * 4)
        own = _kept(own * decay)
        # A NaN among them is 0 then: it is in `own` too.
        behind = keep_lanes(at_least(behind * splat(decay), least), 0, i, _ONE)
        if row >= 0:
            write_float32(own, owns + row * 4)
            store(behind * load(by_key + row * _LANES, _F32), by_key_of + row * _LANES, _F32)
            store(behind * load(by_query + row * _LANES, _F32), by_query_of + row * _LANES, _F32)
    store(behind, lasts, _F32)
    return own


@jit
def _update_row(read, own, before, by_key, by_query, updates, value, beta, out, like):
    """One row in 32 columns: its update, and its output. `before`: updates of the window before it."""
    size, factor, scale = size_of(like), splat(own), splat(beta)
    known0, known1 = factor * load(read, _F32), factor * load(read + 64, _F32)
    out0, out1 = factor * load(read + _STRIP, _F32), factor * load(read + _STRIP + 64, _F32)
    for i in range(before):
        x, y = splat(read_float32(by_key + i * 4)), splat(read_float32(by_query + i * 4))
        u0, u1 = load(updates + i * _STRIP, _F32), load(updates + i * _STRIP + 64, _F32)
        known0, known1 = fma(x, u0, known0), fma(x, u1, known1)
        out0, out1 = fma(y, u0, out0), fma(y, u1, out1)
    u0 = (load(value, like) - known0) * scale
    u1 = (load(value + 16 * size, like) - known1) * scale
    store(u0, updates + before * _STRIP, _F32)
    store(u1, updates + before * _STRIP + 64, _F32)
    y = splat(read_float32(by_query + before * 4))
    store(fma(y, u0, out0), out, like)
    store(fma(y, u1, out1), out + 16 * size, like)


@jit
def _add_row(read, own, before, by_query, updates, value, step, skip, out, like):
    """`_update_row` of Mamba-2, whose updates know nothing of the state."""
    size, factor, scale, part = size_of(like), splat(own), splat(step), splat(skip)
    out0, out1 = factor * load(read + _STRIP, _F32), factor * load(read + _STRIP + 64, _F32)
    for i in range(before):
        y = splat(read_float32(by_query + i * 4))
        out0 = fma(y, load(updates + i * _STRIP, _F32), out0)
        out1 = fma(y, load(updates + i * _STRIP + 64, _F32), out1)
    x0, x1 = load(value, like), load(value + 16 * size, like)
    u0, u1 = x0 * scale, x1 * scale
    store(u0, updates + before * _STRIP, _F32)
    store(u1, updates + before * _STRIP + 64, _F32)
    y = splat(read_float32(by_query + before * 4))
    store(fma(part, x0, fma(y, u0, out0)), out, like)
    store(fma(part, x1, fma(y, u1, out1)), out + 16 * size, like)


def _rule_units(team, arguments, like):
    table, qkv, decay, beta = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                               read_int64(arguments + 24))  # fmt: skip
    out, key_heads, group = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    dk, dv = read_int64(arguments + 56), read_int64(arguments + 64)
    states, state_row, all_keys = (read_int64(arguments + 72), read_int64(arguments + 80),
                                   read_int64(arguments + 88))  # fmt: skip
    all_updates, all_decays, window_row = (read_int64(arguments + 96), read_int64(arguments + 104),
                                           read_int64(arguments + 112))  # fmt: skip
    skip, query_at, key_at, value_at = (read_int64(arguments + 120), read_int64(arguments + 128),
                                        read_int64(arguments + 136), read_int64(arguments + 144))  # fmt: skip
    value_heads, strips, size = key_heads * group, dv // COLUMNS, size_of(like)
    row_bytes = (2 * key_heads * dk + value_heads * dv) * size
    scale = np.float32(1.0 / math.sqrt(dk))
    left, zeros = np.empty(2 * WINDOW * dk, np.float32), np.zeros(dk * COLUMNS, np.float32)
    scaled, read = np.empty(WINDOW * dk, np.float32), np.empty(2 * WINDOW * COLUMNS, np.float32)
    numbers = np.zeros(4 * WINDOW * WINDOW + 2 * WINDOW, np.float32)
    places = np.empty(2 * WINDOW, np.int64)
    units = read_int64(table) * key_heads
    while True:
        unit = take_unit(team, units)
        if unit >= units:
            break
        # Addresses are taken in the loop: numba frees an array behind its last use by name.
        by_key = numbers.ctypes.data
        by_query, by_key_of = by_key + WINDOW * _LANES, by_key + 2 * WINDOW * _LANES
        by_query_of, owns = by_key + 3 * WINDOW * _LANES, by_key + 4 * WINDOW * _LANES
        lasts, given_row = owns + _LANES, places.ctypes.data
        head, here = unit % key_heads, table + HEADER_BYTES + unit // key_heads * UNIT_BYTES
        rows, count, start = table + read_int64(here) * 8, read_int64(here + 8), read_int64(here + 16)
        window = read_int64(here + 24) * window_row
        state, target = read_int64(here + 32), table + read_int64(here + 40) * 8
        keys = all_keys + window + head * WINDOW * dk * 4
        _bring_near(keys, (start % WINDOW) * dk * 4)
        done = 0
        while done < count:
            first = (start + done) % WINDOW
            num = min(WINDOW - first, count - done)
            for r in range(num):
                at = qkv + read_int64(rows + (done + r) * 8) * row_bytes + head * dk * size
                key, query = left.ctypes.data + 2 * r * dk * 4, left.ctypes.data + (2 * r + 1) * dk * 4
                if skip == 0:
                    _unit_length(at + query_at, query, dk, scale, like)
                    _unit_length(at + key_at, key, dk, _ONE, like)
                else:
                    _as_it_is(at + query_at, query, dk, like)
                    _as_it_is(at + key_at, key, dk, like)
                for d in range(0, dk, 16):
                    store(load(key + d * 4, _F32), keys + ((first + r) * dk + d) * 4, _F32)
                _products(keys, key, query, first + r + 1, dk, by_key + r * _LANES, by_query + r * _LANES)
            ends = first + num == WINDOW
            # What is read next, and too short for a processor to foresee.
            for v in range(head * group * strips, (head + 1) * group * strips):
                _bring_near(all_updates + window + v * WINDOW * _STRIP, first * _STRIP)
            goal = read_int64(target) if ends else state
            for v in range(head * group, (head + 1) * group):
                for r in range(num):
                    places[r] = (read_int64(rows + (done + r) * 8) * value_heads + v) * 4
                own = _coefficients(
                    first, num, decay, given_row, all_decays + window + v * _LANES,
                    by_key, by_query, owns, by_key_of, by_query_of, lasts,
                )  # fmt: skip
                if ends:
                    for i in range(WINDOW):
                        factor = splat(read_float32(lasts + i * 4))
                        for d in range(0, dk, 16):
                            offset = (i * dk + d) * 4
                            store(factor * load(keys + offset, _F32), scaled.ctypes.data + offset, _F32)
                for s in range(strips):
                    offset = (v * strips + s) * dk * _STRIP
                    columns = states + state * state_row + offset
                    if start + done < WINDOW:
                        columns = zeros.ctypes.data
                    updates = all_updates + window + (v * strips + s) * WINDOW * _STRIP
                    _read_columns(columns, left.ctypes.data, read.ctypes.data, dk, 2 * num)
                    for r in range(num):
                        row = read_int64(rows + (done + r) * 8)
                        column = (v * dv + s * COLUMNS) * size
                        products = read.ctypes.data + 2 * r * _STRIP
                        own_row, value = read_float32(owns + r * 4), qkv + row * row_bytes + value_at + column
                        to = out + row * value_heads * dv * size + column
                        if skip == 0:
                            _update_row(
                                products, own_row, first + r, by_key_of + r * _LANES, by_query_of + r * _LANES,
                                updates, value, read_float32(beta + places[r]), to, like,
                            )  # fmt: skip
                        else:
                            _add_row(
                                products, own_row, first + r, by_query_of + r * _LANES, updates, value,
                                read_float32(beta + places[r]), read_float32(skip + v * 4), to, like,
                            )  # fmt: skip
                    if ends:
                        _fold_columns(
                            columns, states + goal * state_row + offset, own, scaled.ctypes.data, updates, dk
                        )
            if ends:
                state, target = goal, target + 8
            done += num


_all_units = Kernel(_rule_units, "qqqqqqqqqqqqqqqqqqq")
