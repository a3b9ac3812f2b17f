"""A base linear over 8-bit floats by torch's product of them: the activations are rounded to e4m3 too, each row with a
scale of its own, and the tensor cores multiply both sides as they are. Libraries choose the order of its sums by the
number of rows: a row's bits depend on how many lie beside it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import fields

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear.triton_fp8 import PackedFloats
from loraplex.kernels.linear.triton_splits import SplitTiling

_MOST_SCALED_BEHIND = 128
"""The most rows that are scaled behind the product. cuBLAS reads a weight up to twice as fast without scales for each
row, and many rows take longer to scale."""
_COLUMNS = 1024
_MULTIPLE = 16
"""Inputs and outputs are multiples of it."""


def obstacle_to(weight: PackedFloats) -> str | None:
    """Why torch cannot multiply with a weight; None where it can."""
    columns, inputs = weight.shape
    if not weight.activations:
        return "the checkpoint is made for activations in 16 bits"
    if not weight.converts:
        return "the GPU has no products of 8-bit floats: compute capability 8.9 is needed"
    if weight.group != inputs:
        return "the weight has scales along its inputs"
    if weight.dtype is not torch.bfloat16:
        return f"its results are bfloat16, and the model's are {str(weight.dtype).removeprefix('torch.')}"
    if columns % _MULTIPLE or inputs % _MULTIPLE:
        return f"{columns} outputs of {inputs} inputs are no multiples of {_MULTIPLE}"
    return None


class ScaledFloats(PackedFloats):
    """The same weight, for which there is no `obstacle_to` torch's product."""

    __slots__ = ()

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, tiling: SplitTiling | None = None
    ) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        if not rows.shape[0]:
            return torch.empty(*x.shape[:-1], self.shape[0], dtype=x.dtype, device=x.device)
        product = scale_behind if rows.shape[0] <= _MOST_SCALED_BEHIND else scale_within
        return product(rows, self, bias).view(*x.shape[:-1], -1)


def prefer_library(weight: PackedFloats) -> PackedFloats:
    """The weight by torch's product where that can multiply with it, which is faster."""
    if obstacle_to(weight) is not None:
        return weight
    return ScaledFloats(**{field.name: getattr(weight, field.name) for field in fields(weight)})


def scale_within(x: torch.Tensor, weight: PackedFloats, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` for x [M, K], M at least 1, by the product that takes a scale for each row and output."""
    rounded, scales = to_floats(x)
    return torch._scaled_mm(
        rounded, weight.values.t(), scale_a=scales, scale_b=weight.scales, bias=bias, out_dtype=x.dtype
    )


def scale_behind(
    x: torch.Tensor, weight: PackedFloats, bias: torch.Tensor | None = None, *, fast: bool = False
) -> torch.Tensor:
    """`scale_within` by the product of values alone, rounded once more, and what scales it. `fast`: sums of fewer
    digits."""
    rounded, scales = to_floats(x)
    y = torch._scaled_mm(
        rounded,
        weight.values.t(),
        scale_a=weight.one,
        scale_b=weight.one,
        out_dtype=x.dtype,
        use_fast_accum=fast,
    )
    rows, columns = y.shape
    scale_program[(rows, triton.cdiv(columns, _COLUMNS))](
        y,
        scales,
        weight.scales,
        scales if bias is None else bias,
        columns,
        HAS_BIAS=bias is not None,
        BLOCK=_COLUMNS,
        num_warps=4,
    )
    return y


def to_floats(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], rows contiguous → values [M, K] e4m3 and scales [M, 1] float32, with x ≈ values · scales. A row that
    holds a number which is not finite becomes NaN."""
    rows, inputs = x.shape
    values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(inputs)
        to_floats_program[(rows,)](
            x, values, scales, x.stride(0), inputs, BLOCK=block, num_warps=min(16, max(4, block // 1024))
        )
    return values, scales


@triton.jit
def to_floats_program(x_ptr, values_ptr, scales_ptr, x_row, K, BLOCK: tl.constexpr):
    """One row of x. Grid: rows. 448 is the largest number in e4m3."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + k, k < K, 0.0).to(tl.float32)
    # NaN where a number is not finite: a maximum drops them.
    scale = tl.max(tl.abs(x), 0) * (1 / 448) + tl.sum(x * 0.0, 0)
    grown = tl.where(scale > 0, 1 / scale, 0.0)
    values = tl.minimum(tl.maximum(x * grown, -448.0), 448.0)
    tl.store(values_ptr + row * K + k, values.to(tl.float8e4nv, fp_downcast_rounding="rtne"), k < K)
    tl.store(scales_ptr + row, scale)


@triton.jit
def scale_program(y_ptr, rows_ptr, columns_ptr, bias_ptr, N, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """y[m, n] · rows[m] · columns[n] + bias[n], in place. Grid: rows, columns ÷ BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * N + n, n < N, 0.0).to(tl.float32)
    y *= tl.load(rows_ptr + row) * tl.load(columns_ptr + n, n < N, 0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), n < N)
