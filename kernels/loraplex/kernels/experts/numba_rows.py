"""Rows grouped by expert on a CPU, compiled by numba: `group`, `gather`, `clamped`, `combine`, `add_gated` and
`keep_starts` of `loraplex.kernels.experts.torch_experts`."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from loraplex.kernels.experts.types import ExpertActivation, ExpertRows, Routes
from loraplex.kernels.linear.numba_blocks import PIECE_BYTES, PIECE_ROWS
from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    exp,
    first_lane,
    fma,
    jit,
    load_first,
    load_some,
    maximum,
    read_float32,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    store_some,
    write_int64,
)

_PIECE_BYTES, _PIECE_ROWS = PIECE_BYTES, PIECE_ROWS
_F32, _ONE = np.float32(0), np.float32(1)


@dataclass(frozen=True, slots=True)
class NumbaExpertRows(ExpertRows):
    """`pieces` [1 + n, 4] int64: as `linear.numba_blocks.PIECE_BYTES` says, for the linears."""

    pieces: torch.Tensor


def group(routes: Routes, num_experts: int) -> NumbaExpertRows:
    rows, top_k = routes.ids.shape
    places = rows * top_k
    most = min(places, num_experts + places // PIECE_ROWS)
    made = NumbaExpertRows(
        torch.empty(num_experts + 1, dtype=torch.int64),
        torch.empty(places, dtype=torch.int64),
        torch.empty(rows, top_k, dtype=torch.int64),
        torch.empty(1 + most, PIECE_BYTES // 8, dtype=torch.int64),
    )
    _group_all.run(
        (),
        routes.ids.data_ptr(),
        top_k,
        num_experts,
        places,
        made.starts.data_ptr(),
        made.row_of.data_ptr(),
        made.place_of.data_ptr(),
        made.pieces.data_ptr(),
        alone=True,
    )
    return made


@jit
def _count(ids, places, starts, experts):
    for e in range(experts + 1):
        write_int64(0, starts + e * 8)
    for p in range(places):
        at = starts + (read_int64(ids + p * 8) + 1) * 8
        write_int64(read_int64(at) + 1, at)
    for e in range(experts):
        write_int64(read_int64(starts + e * 8) + read_int64(starts + e * 8 + 8), starts + e * 8 + 8)


@jit
def _cut(starts, experts, pieces):
    """Pieces of equal size of the rows of each expert."""
    count = 0
    for e in range(experts):
        first, rows = read_int64(starts + e * 8), read_int64(starts + e * 8 + 8) - read_int64(starts + e * 8)
        parts = (rows + _PIECE_ROWS - 1) // _PIECE_ROWS
        for part in range(parts):
            count += 1
            at, begin = pieces + count * _PIECE_BYTES, rows * part // parts
            write_int64(e, at)
            write_int64(first + begin, at + 8)
            write_int64(rows * (part + 1) // parts - begin, at + 16)
    write_int64(count, pieces)


def _group_units(team, arguments):
    ids, top_k, experts = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    places, starts, row_of = (read_int64(arguments + 24), read_int64(arguments + 32),
                              read_int64(arguments + 40))  # fmt: skip
    place_of, pieces = read_int64(arguments + 48), read_int64(arguments + 56)
    if take_unit(team, 1) == 0:
        _count(ids, places, starts, experts)
        _cut(starts, experts, pieces)
        following = np.empty(experts, np.int64)
        for e in range(experts):
            following[e] = read_int64(starts + e * 8)
        for p in range(places):
            expert = read_int64(ids + p * 8)
            write_int64(p // top_k, row_of + following[expert] * 8)
            write_int64(following[expert], place_of + p * 8)
            following[expert] += 1


_group_all = Kernel(_group_units, "q" * 8)


def gather(x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    places, columns = len(rows.row_of), x.shape[1]
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(places, columns, dtype=x.dtype)
    stride = x.stride(0) * x.element_size()
    _gather_all.run(
        (LIKE[x.dtype],), x.data_ptr(), stride, columns, rows.row_of.data_ptr(), out.data_ptr(), places,
        rows_of_unit(places), alone=places * columns <= SMALL,
    )  # fmt: skip
    return out


def _gather_units(team, arguments, like):
    x, row_bytes, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    row_of, out = read_int64(arguments + 24), read_int64(arguments + 32)
    places, share, size = read_int64(arguments + 40), read_int64(arguments + 48), size_of(like)
    units = (places + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= places:
            break
        for place in range(first, min(first + share, places)):
            source, target = x + read_int64(row_of + place * 8) * row_bytes, out + place * columns * size
            for c in range(0, columns, 16):
                value = load_some(source + c * size, columns - c, like)
                store_some(value, target + c * size, columns - c, like)


_gather_all = Kernel(_gather_units, "q" * 7)


def clamped(gate_up: torch.Tensor, kind: ExpertActivation) -> torch.Tensor:
    """Raises ValueError where there are not as many columns of a gate as of what it is for, side by side."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"{list(gate_up.shape)} are not rows of a gate and what it is for")
    out = torch.empty(rows, columns, dtype=gate_up.dtype)
    _clamp_all.run(
        (LIKE[gate_up.dtype],), gate_up.data_ptr(), out.data_ptr(), columns, kind.alpha, kind.limit, rows,
        rows_of_unit(rows), alone=rows * columns <= SMALL // 2,
    )  # fmt: skip
    return out


def _clamp_units(team, arguments, like):
    gates, out, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    alpha, limit = read_float64(arguments + 24), splat(read_float64(arguments + 32))
    rows, share, size = read_int64(arguments + 40), read_int64(arguments + 48), size_of(like)
    units, one, zero = (rows + share - 1) // share, splat(_ONE), splat(_F32)
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            gate, target = gates + row * 2 * columns * size, out + row * columns * size
            for c in range(0, columns, 16):
                # -max(-a, -b) is the minimum; a NaN, which `maximum` takes for the smaller, is put back by the sum.
                left = columns - c
                g = load_some(gate + c * size, left, like)
                u = load_some(gate + (columns + c) * size, left, like)
                lost = (g - g) + (u - u)
                g = zero - maximum(zero - g, zero - limit)
                u = maximum(zero - maximum(zero - u, zero - limit), zero - limit)
                value = (u + one) * (g / (one + exp(zero - splat(alpha) * g)))
                store_some(value + lost, target + c * size, left, like)


_clamp_all = Kernel(_clamp_units, "qqqddqq")


def combine(y: torch.Tensor, routes: Routes, rows: ExpertRows) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    count, top_k = routes.ids.shape
    places, columns = y.shape
    if places != count * top_k or rows.place_of.shape != routes.ids.shape or not y.is_contiguous():
        raise ValueError(f"y {list(y.shape)} does not fit {count} rows of {top_k} experts")
    out = torch.empty(count, columns, dtype=y.dtype)
    _combine_all.run(
        (LIKE[y.dtype],), y.data_ptr(), columns, rows.place_of.data_ptr(), routes.weights.data_ptr(), top_k,
        out.data_ptr(), count, rows_of_unit(count), alone=places * columns <= SMALL,
    )  # fmt: skip
    return out


def _combine_units(team, arguments, like):
    y, columns, place_of = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    weights, top_k, out = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    rows, share, size = read_int64(arguments + 48), read_int64(arguments + 56), size_of(like)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            own, its_places = weights + row * top_k * 4, place_of + row * top_k * 8
            for c in range(0, columns, 16):
                total = splat(_F32)
                for j in range(top_k):
                    place = y + (read_int64(its_places + j * 8) * columns + c) * size
                    total = fma(splat(read_float32(own + j * 4)), load_some(place, columns - c, like), total)
                store_some(total, out + (row * columns + c) * size, columns - c, like)


_combine_all = Kernel(_combine_units, "q" * 8)


def add_gated(out: torch.Tensor, y: torch.Tensor, gate: torch.Tensor) -> None:
    """Raises ValueError where they do not fit."""
    rows, columns = out.shape
    fits = y.shape == out.shape and gate.shape == (rows, 1) and out.dtype is y.dtype is gate.dtype
    if not (fits and out.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"y {list(y.shape)} and its gate {list(gate.shape)} do not fit {list(out.shape)}")
    _add_all.run(
        (LIKE[out.dtype],), out.data_ptr(), y.data_ptr(), gate.data_ptr(), gate.stride(0) * gate.element_size(),
        columns, rows, rows_of_unit(rows), alone=rows * columns <= SMALL,
    )  # fmt: skip


def _add_units(team, arguments, like):
    out, y, gate = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    gate_row, columns = read_int64(arguments + 24), read_int64(arguments + 32)
    rows, share = read_int64(arguments + 40), read_int64(arguments + 48)
    units, size, one = (rows + share - 1) // share, size_of(like), splat(_ONE)
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            x = splat(_F32) - load_first(gate + row * gate_row, 1, like)
            opened = splat(first_lane(rounded(one / (one + exp(x)), like)))
            for c in range(0, columns, 16):
                at, left = (row * columns + c) * size, columns - c
                value = rounded(load_some(y + at, left, like) * opened, like)
                store_some(load_some(out + at, left, like) + value, out + at, left, like)


_add_all = Kernel(_add_units, "q" * 7)


def keep_starts(rows: ExpertRows, into: torch.Tensor) -> None:
    """Raises ValueError where they do not fit."""
    if into.shape != rows.starts.shape or into.dtype is not torch.int64 or not into.is_contiguous():
        raise ValueError(
            f"starts of {len(rows.starts) - 1} experts do not fit into {list(into.shape)} {into.dtype}"
        )
    _keep_all.run((), rows.starts.data_ptr(), into.data_ptr(), len(into), alone=True)


def _keep_units(team, arguments):
    starts, into, count = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    if take_unit(team, 1) == 0:
        for e in range(count):
            write_int64(read_int64(starts + e * 8), into + e * 8)


_keep_all = Kernel(_keep_units, "qqq")
