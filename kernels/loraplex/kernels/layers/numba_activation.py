"""The functions of `loraplex.kernels.layers.activation` on a CPU, compiled by numba."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    exp,
    fma,
    jit,
    load_some,
    maximum,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    store_some,
)

_F32, _ONE = np.float32(0), np.float32(1)
_SILU, _GELU, _RELU, _TIMES = range(4)


def act_and_mul(gate_up: torch.Tensor, gelu: bool, up: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) · up, or gelu(gate) · up with the tanh approximation. gate_up: [T, 2·I], gate before up; or the gate
    alone, [T, I], and `up` [T, I], its last axis contiguous. Returns [T, I]."""
    if gate_up.dim() != 2 or (up is None and gate_up.shape[1] % 2):
        raise ValueError(f"{list(gate_up.shape)} are not rows of a gate and what it is for")
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    if up is None:
        up = gate_up[:, gate_up.shape[1] // 2 :]
    elif up.shape != gate_up.shape or up.dtype is not gate_up.dtype or up.stride(1) != 1:
        raise ValueError(f"a gate of {list(gate_up.shape)} does not fit {list(up.shape)} {up.dtype}")
    return _activate(gate_up, up, _GELU if gelu else _SILU)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)², of x [T, I] whose last axis is contiguous."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"{list(x.shape)} of strides {x.stride()} are not rows")
    return _activate(x, x, _RELU)


def times(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x · factor, of x [T, I] whose last axis is contiguous."""
    return _activate(x, x, _TIMES, factor)


def _activate(gate: torch.Tensor, up: torch.Tensor, activation: int, factor: float = 1.0) -> torch.Tensor:
    rows, columns = up.shape
    out = torch.empty((rows, columns), dtype=gate.dtype)
    size = gate.element_size()
    arguments = (
        LIKE[gate.dtype],
        gate.data_ptr(),
        gate.stride(0) * size,
        up.data_ptr(),
        up.stride(0) * size,
        out.data_ptr(),
        columns,
        activation,
        float(factor),
    )
    alone = rows * columns <= SMALL // 2
    _activate_all.run(arguments[:1], *arguments[1:], rows, rows_of_unit(rows), alone=alone)
    return out


@jit
def _gate_columns(gate, up, target, columns, like):
    """One row of silu(gate) · up."""
    size, one = size_of(like), splat(_ONE)
    for c in range(0, columns, 16):
        left = columns - c
        g = load_some(gate + c * size, left, like)
        # torch rounds the activation before it multiplies.
        value = rounded(g / (one + exp(splat(_F32) - g)), like)
        store_some(value * load_some(up + c * size, left, like), target + c * size, left, like)


@jit
def _gate_columns_by_gelu(gate, up, target, columns, like):
    """One row of gelu(gate) · up: (1 + tanh(z)) / 2 is the logistic function of 2z."""
    size, one = size_of(like), splat(_ONE)
    cube, twice = splat(0.044715), splat(2.0 * math.sqrt(2.0 / math.pi))
    for c in range(0, columns, 16):
        left = columns - c
        g = load_some(gate + c * size, left, like)
        inner = fma(g * g * g, cube, g) * twice
        value = rounded(g / (one + exp(splat(_F32) - inner)), like)
        store_some(value * load_some(up + c * size, left, like), target + c * size, left, like)


@jit
def _square_columns(row, target, columns, like):
    """One row of relu(x)²."""
    size, zero = size_of(like), splat(_F32)
    for c in range(0, columns, 16):
        left = columns - c
        value = maximum(zero, load_some(row + c * size, left, like))
        store_some(value * value, target + c * size, left, like)


@jit
def _multiply_columns(row, target, columns, factor, like):
    size = size_of(like)
    for c in range(0, columns, 16):
        left = columns - c
        store_some(load_some(row + c * size, left, like) * factor, target + c * size, left, like)


@jit
def _activate_rows(like, gates, gate_row, ups, up_row, out, columns, activation, factor, first, last):
    for row in range(first, last):
        gate, up = gates + row * gate_row, ups + row * up_row
        target = out + row * columns * size_of(like)
        if activation == _GELU:
            _gate_columns_by_gelu(gate, up, target, columns, like)
        elif activation == _RELU:
            _square_columns(gate, target, columns, like)
        elif activation == _TIMES:
            _multiply_columns(gate, target, columns, splat(factor), like)
        else:
            _gate_columns(gate, up, target, columns, like)


def _activate_units(team, arguments, like):
    gates, gate_row, ups = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    up_row, out, columns = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    activation, factor = read_int64(arguments + 48), np.float32(read_float64(arguments + 56))
    rows, share = read_int64(arguments + 64), read_int64(arguments + 72)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        last = min(first + share, rows)
        _activate_rows(like, gates, gate_row, ups, up_row, out, columns, activation, factor, first, last)


_activate_all = Kernel(_activate_units, "qqqqqqqdqq")
