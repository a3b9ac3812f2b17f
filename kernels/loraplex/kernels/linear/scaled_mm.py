"""Activations for torch's product of 8-bit floats, which takes both sides in e4m3: each row with a scale of its own."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = 448.0
"""The largest number in e4m3."""


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
    """One row of x. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + k, k < K, 0.0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    # NaN where a number is not finite: a maximum drops them.
    scale = peak * (1 / 448) + tl.sum(x * 0.0, 0)
    grown = tl.where(scale > 0, 1 / scale, 0.0)
    values = tl.minimum(tl.maximum(x * grown, -448.0), 448.0)
    tl.store(values_ptr + row * K + k, values.to(tl.float8e4nv, fp_downcast_rounding="rtne"), k < K)
    tl.store(scales_ptr + row, scale)
