"""RMSNorm and the residual addition before it on a CPU, compiled by numba: the functions of
`loraplex.kernels.layers.norm`."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    fma,
    horizontal_sum,
    jit,
    load_some,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    store_some,
)

_F32, _ONE = np.float32(0), np.float32(1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside, rounded once.

    x: [..., C]; weight: [C] of any dtype of `LIKE`, or [G, C] with x [..., G·C]; returns a contiguous tensor of x's
    shape and dtype. Raises ValueError for other shapes.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    columns = weight.shape[-1] if weight.dim() > 1 else x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1 or weight.dim() > 1:
        x = x.contiguous()
    rows = x.numel() // columns if columns else 0
    own = x.dim() == 2 and weight.dim() == 1
    _norm(x, x.stride(0) if own else columns, None, out, rows, weight, eps, 1.0)
    return out


def norm_in_place(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """x [T, C] becomes its norm; rows may lie apart."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"{list(x.shape)} of strides {x.stride()} are not rows")
    _norm(x, x.stride(0), None, x, x.shape[0], weight, eps, 1.0)


def add(residual: torch.Tensor, x: torch.Tensor) -> None:
    """residual += x, in place; both as `add_rms_norm` has them."""
    _check_sum(x, residual)
    _norm(x, x.stride(0), residual, None, x.shape[0], None, 0.0, 1.0)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> torch.Tensor:
    """residual = (residual + x) · scale, in place, with the sum rounded before it is scaled; returns
    rms_norm(residual), of what that was rounded to. x, residual: [T, C] of one dtype, last axis contiguous."""
    _check_sum(x, residual)
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm(x, x.stride(0), residual, out, x.shape[0], weight, eps, scale)
    return out


def _check_sum(x, residual) -> None:
    if (
        x.shape != residual.shape
        or x.dtype is not residual.dtype
        or x.dim() != 2
        or x.stride(1) != 1
        or residual.stride(1) != 1
    ):
        raise ValueError(
            f"{list(x.shape)} {x.dtype} can't be added to {list(residual.shape)} {residual.dtype} by rows"
        )


def _norm(x, stride, residual, out, rows, weight, eps, scale) -> None:
    columns, groups = x.shape[-1], 1
    if weight is not None:
        if weight.numel() != columns or not weight.is_contiguous():
            raise ValueError(f"a norm's weight of {list(weight.shape)} does not fit rows of {columns}")
        groups, columns = columns // weight.shape[-1], weight.shape[-1]
        if rows * columns != x.numel():
            raise ValueError(
                f"rows of {columns} with {groups} weights are {x.numel() // columns}, not {rows}"
            )
    size = x.element_size()
    arguments = (
        LIKE[x.dtype],
        LIKE[x.dtype if weight is None else weight.dtype],
        x.data_ptr(),
        stride * size,
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0) * size,
        0 if out is None else out.data_ptr(),
        columns * size if out is not x else stride * size,
        0 if weight is None else weight.data_ptr(),
        columns,
        float(eps),
        float(scale),
        groups,
    )
    alone = rows * columns <= SMALL
    _norm_all.run(arguments[:2], *arguments[2:], rows, rows_of_unit(rows), alone=alone)


@jit
def scaled(source, target, weight, columns, squares, eps, like, weight_like):
    """A row over the root of its mean square, times the weight; `squares` are the lanes of its sum of squares."""
    mean = horizontal_sum(squares) / np.float32(columns)
    factor = splat(_ONE / math.sqrt(mean + np.float32(eps)))
    for c in range(0, columns, 16):
        left = columns - c
        value = load_some(source + c * size_of(like), left, like) * factor
        value = value * load_some(weight + c * size_of(weight_like), left, weight_like)
        store_some(value, target + c * size_of(like), left, like)


@jit
def _norm_rows(
    like,
    weight_like,
    x,
    stride,
    residual,
    residual_stride,
    out,
    out_stride,
    weight,
    columns,
    eps,
    scale,
    groups,
    first,
    last,
):
    """Row r has the weights of group r % groups."""
    size = size_of(like)
    for row in range(first, last):
        source = x + row * stride
        squares = splat(_F32)
        if residual != 0:
            total = residual + row * residual_stride
            for c in range(0, columns, 16):
                left = columns - c
                added = load_some(source + c * size, left, like) + load_some(total + c * size, left, like)
                added = rounded(added, like)
                if scale != _ONE:
                    added = rounded(added * splat(scale), like)
                store_some(added, total + c * size, left, like)
                squares = fma(added, added, squares)
            source = total
        else:
            for c in range(0, columns, 16):
                value = load_some(source + c * size, columns - c, like)
                squares = fma(value, value, squares)
        if weight != 0:
            own = weight + row % groups * columns * size_of(weight_like)
            scaled(source, out + row * out_stride, own, columns, squares, eps, like, weight_like)


def _norm_units(team, arguments, like, weight_like):
    x, stride, residual = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    residual_stride, out, out_stride = (
        read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    )  # fmt: skip
    weight, columns = read_int64(arguments + 48), read_int64(arguments + 56)
    eps, scale = read_float64(arguments + 64), np.float32(read_float64(arguments + 72))
    groups, rows, share = read_int64(arguments + 80), read_int64(arguments + 88), read_int64(arguments + 96)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        last = min(first + share, rows)
        _norm_rows(
            like, weight_like, x, stride, residual, residual_stride, out, out_stride, weight, columns, eps, scale,
            groups, first, last,
        )  # fmt: skip


_norm_all = Kernel(_norm_units, "qqqqqqqqddqqq")
