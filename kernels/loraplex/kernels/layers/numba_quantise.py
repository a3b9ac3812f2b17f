"""Rows of activations as 8-bit codes in groups of 32 columns, on a CPU, compiled by numba.

A group's scale is its largest magnitude over 127, and a code is the nearest whole number to value · (127 / largest),
ties to even. A scale is never over more than one row, so a row's codes depend on that row alone. The arithmetic is
float32's by single operations: every processor makes the same codes.

    x[r, k] ≈ scale[r, g] · codes[r, k]      for k in group g
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, jit, read_int64, size_of
from loraplex.kernels.weight_form import ACTIVATION_GROUP

GROUP = ACTIVATION_GROUP
"""Columns that share a scale."""
RECORD = 3
"""Numbers that are kept of a group: the scale, the scale times the sum of its codes, and that sum times -128, as an
int32: what products with codes that are moved up by 128 are too large by."""
_GROUP, _RECORD_BYTES = GROUP, 4 * RECORD
_LARGEST_CODE = 127.0
_LEAST = np.float32(2.0**-100)
"""The least magnitude that codes stand for: 127 over a smaller one might be infinite."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """`codes` [T, K] int8 in -127…127; `groups` [T, K / 32, 3] float32, by `RECORD`, of an int32 its bits. A
    group with a number that is not finite has a scale that is not finite."""

    codes: torch.Tensor
    groups: torch.Tensor


def empty_rows(rows: int, columns: int) -> QuantisedRows:
    """Memory for the codes of rows [rows, columns]."""
    return QuantisedRows(
        torch.empty(rows, columns, dtype=torch.int8),
        torch.empty(rows, columns // GROUP, RECORD, dtype=torch.float32),
    )


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """The codes of x [T, K], of a dtype of `LIKE`, its last axis contiguous. Raises ValueError where K is no multiple
    of 32, or x has another shape."""
    if x.dim() != 2 or x.shape[1] % GROUP or x.stride(1) != 1:
        raise ValueError(f"rows {list(x.shape)} cannot be quantised in groups of {GROUP} columns")
    rows, columns = x.shape
    made = empty_rows(rows, columns)
    _quantise_all.run(
        (LIKE[x.dtype],),
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        made.codes.data_ptr(),
        made.groups.data_ptr(),
        columns,
        rows,
        rows_of_unit(rows),
        alone=rows * columns <= SMALL,
    )
    return made


@intrinsic
def _quantise_group(typing, source, codes, record, like):
    """The codes and the record of one group."""

    def lower(context, builder, signature, values):
        source, codes, record, _ = values
        element = nir.elements(context, signature.args[3])
        parts = [
            element.load(builder, builder.add(source, nir.i64(element.size * start))) for start in (0, 16)
        ]
        # As whole numbers, magnitudes have the order of the floats, and what is not finite is above all others.
        magnitudes = [
            builder.and_(builder.bitcast(part, nir.V_I32), nir.vector(nir.V_I32, 0x7FFFFFFF))
            for part in parts
        ]
        is_larger = builder.icmp_signed(">", *magnitudes)
        largest = nir.call(
            builder,
            "llvm.vector.reduce.smax.v16i32",
            nir.I32,
            [builder.select(is_larger, *magnitudes)],
        )
        least = ir.Constant(nir.I32, int(_LEAST.view(np.int32)))
        is_zero = builder.icmp_signed("<", largest, least)
        zero, most = ir.Constant(nir.F32, 0.0), ir.Constant(nir.F32, _LARGEST_CODE)
        magnitude = builder.bitcast(largest, nir.F32)
        scale = builder.select(is_zero, zero, builder.fdiv(magnitude, most))
        factor = nir.splat(builder, builder.select(is_zero, zero, builder.fdiv(most, magnitude)))
        # Adding 1.5·2²³ leaves the nearest whole number in the low digits. The last byte is the code.
        magic = nir.vector(nir.V_F32, 12582912.0)
        small = [
            builder.trunc(
                builder.bitcast(builder.fadd(builder.fmul(part, factor), magic), nir.V_I32),
                ir.VectorType(nir.I8, nir.LANES),
            )
            for part in parts
        ]
        for part, start in zip(small, (0, 16), strict=True):
            nir.store(builder, part, builder.add(codes, nir.i64(start)), 1)
        wide = [builder.sext(part, nir.V_I32) for part in small]
        total = nir.call(builder, "llvm.vector.reduce.add.v16i32", nir.I32, [builder.add(*wide)])
        nir.store(builder, scale, record, 4)
        value = builder.fmul(scale, builder.sitofp(total, nir.F32))
        nir.store(builder, value, builder.add(record, nir.i64(4)), 4)
        moved = builder.mul(total, ir.Constant(nir.I32, -128))
        nir.store(builder, moved, builder.add(record, nir.i64(8)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, like), lower


@jit
def quantise_row(source, codes, groups, columns, like):
    """The codes and records of one row, by addresses."""
    for group in range(columns // _GROUP):
        _quantise_group(
            source + group * _GROUP * size_of(like),
            codes + group * _GROUP,
            groups + group * _RECORD_BYTES,
            like,
        )


def _quantise_units(team, arguments, like):
    x, stride, codes = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    groups, columns = read_int64(arguments + 24), read_int64(arguments + 32)
    rows, share = read_int64(arguments + 40), read_int64(arguments + 48)
    units = (rows + share - 1) // share
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        for row in range(first, min(first + share, rows)):
            quantise_row(
                x + row * stride,
                codes + row * columns,
                groups + row * (columns // _GROUP) * _RECORD_BYTES,
                columns,
                like,
            )


_quantise_all = Kernel(_quantise_units, "qqqqqqq")
