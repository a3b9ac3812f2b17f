"""The gates and the gated norm around the delta rule on a CPU, compiled by numba: the functions of
`loraplex.kernels.recurrent.torch_recurrent`."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    exp,
    first_lane,
    fma,
    horizontal_sum,
    jit,
    load,
    load_first,
    load_some,
    read_float32,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    store,
    store_some,
    write_float32,
)

_F32, _ONE = np.float32(0), np.float32(1)
_MOST_PARTS = 4


def delta_gates(
    b: torch.Tensor, a: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError where they do not fit."""
    rows, heads = b.shape
    if a.shape != b.shape or a.dtype is not b.dtype or a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"gates {list(a.shape)} {a.dtype} do not fit {list(b.shape)} {b.dtype}")
    if any(each.shape != (heads,) or each.dtype is not torch.float32 for each in (a_log, dt_bias)):
        raise ValueError(f"a_log and dt_bias must be [{heads}] float32")
    beta, decay = torch.empty(rows, heads), torch.empty(rows, heads)
    size = b.element_size()
    _gate_all.run(
        (LIKE[b.dtype],), b.data_ptr(), b.stride(0) * size, a.data_ptr(), a.stride(0) * size, a_log.data_ptr(),
        dt_bias.data_ptr(), beta.data_ptr(), decay.data_ptr(), heads, float(scale), rows, rows_of_unit(rows),
        alone=rows * heads <= SMALL // 64,
    )  # fmt: skip
    return beta, decay


@jit
def _gate_row(b, a, a_log, dt_bias, beta, decay, heads, scale, like):
    """In float64, number by number: there are few, and a decay's digits stay in the state."""
    for h in range(heads):
        x = np.float64(first_lane(load_first(b + h * size_of(like), 1, like)))
        gate = splat(np.float32(1.0 / (1.0 + math.exp(-x))))
        gate = rounded(rounded(gate, like) * splat(scale), like)
        write_float32(first_lane(gate), beta + h * 4)
        own = first_lane(load_first(a + h * size_of(like), 1, like))
        x = np.float64(own + read_float32(dt_bias + h * 4))
        soft = x if x > 20.0 else math.log1p(math.exp(x))
        rate = math.exp(np.float64(read_float32(a_log + h * 4)))
        write_float32(np.float32(math.exp(-rate * soft)), decay + h * 4)


def _gate_units(team, arguments, like):
    b, b_row, a, a_row = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                          read_int64(arguments + 24))  # fmt: skip
    a_log, dt_bias = read_int64(arguments + 32), read_int64(arguments + 40)
    beta, decay, heads = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    scale = np.float32(read_float64(arguments + 72))
    rows, share = read_int64(arguments + 80), read_int64(arguments + 88)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            to = row * heads * 4
            _gate_row(
                b + row * b_row, a + row * a_row, a_log, dt_bias, beta + to, decay + to, heads, scale, like
            )


_gate_all = Kernel(_gate_units, "qqqqqqqqqdqq")


def step_gates(
    dt: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises ValueError where they do not fit."""
    rows, heads = dt.shape
    if dt.stride(1) != 1 or any(
        each.shape != (heads,) or each.dtype is not torch.float32 for each in (a_log, dt_bias)
    ):
        raise ValueError(f"a_log and dt_bias must be [{heads}] float32, as dt has {heads} heads in its rows")
    step, decay = torch.empty(rows, heads), torch.empty(rows, heads)
    _step_all.run(
        (LIKE[dt.dtype],), dt.data_ptr(), dt.stride(0) * dt.element_size(), a_log.data_ptr(), dt_bias.data_ptr(),
        step.data_ptr(), decay.data_ptr(), heads, float(low), float(high), rows, rows_of_unit(rows),
        alone=rows * heads <= SMALL // 64,
    )  # fmt: skip
    return step, decay


@jit
def _step_row(dt, a_log, dt_bias, step, decay, heads, low, high, like):
    """In float64, as `_gate_row`."""
    for h in range(heads):
        bias = rounded(splat(read_float32(dt_bias + h * 4)), like)
        own = rounded(load_first(dt + h * size_of(like), 1, like) + bias, like)
        x = np.float64(first_lane(own))
        soft = x if x > 20.0 else math.log1p(math.exp(x))
        kept = np.float64(first_lane(rounded(splat(np.float32(soft)), like)))
        kept = min(max(kept, low), high)
        write_float32(np.float32(kept), step + h * 4)
        rate = math.exp(np.float64(read_float32(a_log + h * 4)))
        write_float32(np.float32(math.exp(-rate * kept)), decay + h * 4)


def _step_units(team, arguments, like):
    dt, dt_row, a_log, dt_bias = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                                  read_int64(arguments + 24))  # fmt: skip
    step, decay, heads = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    low, high = read_float64(arguments + 56), read_float64(arguments + 64)
    rows, share = read_int64(arguments + 72), read_int64(arguments + 80)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            to = row * heads * 4
            _step_row(dt + row * dt_row, a_log, dt_bias, step + to, decay + to, heads, low, high, like)


_step_all = Kernel(_step_units, "qqqqqqqddqq")


def gated_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Raises ValueError where they do not fit, or heads are no multiple of 16."""
    rows, columns = o.shape
    dim = len(weight)
    if (
        o.shape != z.shape
        or columns % dim
        or dim % 16
        or not o.dtype is z.dtype is weight.dtype
        or z.stride(1) != 1
        or not o.is_contiguous()
    ):
        raise ValueError(
            f"rows {list(o.shape)} {o.dtype}, a gate {list(z.shape)} {z.dtype} and a weight {list(weight.shape)} "
            f"{weight.dtype} do not fit"
        )
    out = torch.empty(rows, columns, dtype=o.dtype)
    _norm_all.run(
        (LIKE[o.dtype],), o.data_ptr(), z.data_ptr(), z.stride(0) * z.element_size(), weight.data_ptr(),
        out.data_ptr(), columns, dim, float(eps), rows, rows_of_unit(rows), alone=o.numel() <= SMALL // 2,
    )  # fmt: skip
    return out


@jit
def _norm_head(o, z, weight, out, dim, eps, like):
    size, squares, one = size_of(like), splat(_F32), splat(_ONE)
    for d in range(0, dim, 16):
        value = load(o + d * size, like)
        squares = fma(value, value, squares)
    mean = horizontal_sum(squares) / np.float32(dim)
    factor = splat(_ONE / np.float32(math.sqrt(mean + np.float32(eps))))
    for d in range(0, dim, 16):
        value = rounded(load(o + d * size, like) * factor, like)
        value = rounded(value * load(weight + d * size, like), like)
        gate = load(z + d * size, like)
        store(value * (gate / (one + exp(splat(_F32) - gate))), out + d * size, like)


def _norm_units(team, arguments, like):
    o, z, z_row, weight = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                           read_int64(arguments + 24))  # fmt: skip
    out, columns, dim = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    eps = read_float64(arguments + 56)
    rows, share = read_int64(arguments + 64), read_int64(arguments + 72)
    units, size = (rows + share - 1) // share, size_of(like)
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            for c in range(0, columns, dim):
                at = (row * columns + c) * size
                _norm_head(o + at, z + row * z_row + c * size, weight, out + at, dim, eps, like)


_norm_all = Kernel(_norm_units, "qqqqqqqdqq")


def output_gate(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    rows, heads, dim = attended.shape
    if (
        attended.shape != gate.shape
        or attended.dtype is not gate.dtype
        or gate.stride(2) != 1
        or not attended.is_contiguous()
    ):
        raise ValueError(f"a gate {list(gate.shape)} {gate.dtype} does not fit heads {list(attended.shape)}")
    out = torch.empty(rows, heads * dim, dtype=attended.dtype)
    size = attended.element_size()
    _output_all.run(
        (LIKE[attended.dtype],), attended.data_ptr(), gate.data_ptr(), gate.stride(0) * size,
        gate.stride(1) * size, out.data_ptr(), heads, dim, rows, rows_of_unit(rows),
        alone=attended.numel() <= SMALL // 2,
    )  # fmt: skip
    return out


def _output_units(team, arguments, like):
    attended, gate, gate_row, gate_head = (read_int64(arguments), read_int64(arguments + 8),
                                           read_int64(arguments + 16), read_int64(arguments + 24))  # fmt: skip
    out, heads, dim = read_int64(arguments + 32), read_int64(arguments + 40), read_int64(arguments + 48)
    rows, share = read_int64(arguments + 56), read_int64(arguments + 64)
    units, size, one = (rows + share - 1) // share, size_of(like), splat(_ONE)
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            for head in range(heads):
                at, own = (row * heads + head) * dim * size, gate + row * gate_row + head * gate_head
                for d in range(0, dim, 16):
                    x = load_some(own + d * size, dim - d, like)
                    factor = rounded(one / (one + exp(splat(_F32) - x)), like)
                    value = load_some(attended + at + d * size, dim - d, like)
                    store_some(value * factor, out + at + d * size, dim - d, like)


_output_all = Kernel(_output_units, "qqqqqqqqq")


def by_part(x: torch.Tensor, heads: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Raises ValueError where they do not fit."""
    rows, columns = x.shape
    if len(sizes) > _MOST_PARTS or heads * sum(sizes) != columns or x.stride(1) != 1:
        raise ValueError(f"{heads} heads of the parts {sizes} are not the columns of {list(x.shape)}")
    out = torch.empty(rows, columns, dtype=x.dtype)
    _part_all.run(
        (LIKE[x.dtype],), x.data_ptr(), x.stride(0) * x.element_size(), out.data_ptr(), heads,
        *sizes, *(0,) * (_MOST_PARTS - len(sizes)), columns, rows, rows_of_unit(rows),
        alone=x.numel() <= SMALL,
    )  # fmt: skip
    return out


def _part_units(team, arguments, like):
    x, x_row, out, heads = (read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16),
                            read_int64(arguments + 24))  # fmt: skip
    columns, rows, share = (read_int64(arguments + 64), read_int64(arguments + 72),
                            read_int64(arguments + 80))  # fmt: skip
    units, size, head_columns = (rows + share - 1) // share, size_of(like), columns // heads
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            target, before = out + row * columns * size, 0
            for part in range(_MOST_PARTS):
                count = read_int64(arguments + 32 + part * 8)
                for head in range(heads):
                    source = x + row * x_row + (head * head_columns + before) * size
                    for c in range(0, count, 16):
                        store_some(
                            load_some(source + c * size, count - c, like), target + c * size, count - c, like
                        )
                    target += count * size
                before += count


_part_all = Kernel(_part_units, "q" * 11)
