"""RMSNorm and the residual addition before it in Triton: the functions of `loraplex.kernels.layers.norm`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_COLUMNS = 1 << 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside, rounded once.

    x: [..., C] of up to three axes, the last contiguous; weight: [C] of any floating dtype, or [G, C] with x
    [T, G·C]; returns a contiguous tensor of x's shape and dtype. Raises ValueError for other shapes.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if weight.dim() == 2 and x.dim() == 2 and x.shape[1] == weight.numel():
        x = torch.unflatten(x, 1, weight.shape)
    _launch(x, None, out, weight, eps, 1.0)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: float = 1.0
) -> torch.Tensor:
    """residual = (residual + x) · scale, in place, with the sum rounded before it is scaled; returns
    rms_norm(residual), of what that was rounded to. x, residual: [T, C] of one dtype."""
    if x.shape != residual.shape or x.dtype is not residual.dtype:
        raise ValueError(
            f"{list(x.shape)} {x.dtype} can't be added to {list(residual.shape)} {residual.dtype}"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, out, weight, eps, scale)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: float,
) -> None:
    columns = x.shape[-1]
    plain = residual is None or (residual.dim() == 2 and residual.stride(-1) == 1)
    groups = x.shape[1:2] if weight.dim() == 2 and x.dim() == 3 else ()
    if (
        weight.shape != (*groups, columns)
        or not weight.is_contiguous()
        or columns > _MAX_COLUMNS
        or not plain
    ):
        raise ValueError(f"no norm of {list(x.shape)} with a weight of {list(weight.shape)}")
    if x.dim() > 3 or x.stride(-1) != 1:
        raise ValueError("the kernel takes up to three axes; the last must be contiguous")
    if not x.numel():
        return
    outer, inner = (1, 1, *x.shape[:-1])[-2:]
    strides = (0, 0, *x.stride()[:-1])[-2:]
    block = triton.next_power_of_2(columns)
    rms_norm_program[(outer * inner,)](
        x,
        x if residual is None else residual,
        out,
        weight,
        inner,
        *strides,
        0 if residual is None else residual.stride(0),
        eps,
        scale,
        COLUMNS=columns,
        WEIGHT_ROW=columns if groups else 0,
        BLOCK=block,
        ADD=residual is not None,
        SCALE=scale != 1.0,
        num_warps=min(16, max(1, block // 512)),
    )


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["inner"])
def rms_norm_program(
    x_ptr,
    residual_ptr,
    out_ptr,
    weight_ptr,
    inner,
    x_outer,
    x_inner,
    residual_row,
    eps,
    scale,
    COLUMNS: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One row of x [outer, inner, COLUMNS], whose strides are x_outer, x_inner and 1. Grid: rows."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    there = c < COLUMNS
    at = (row // inner).to(tl.int64) * x_outer + row % inner * x_inner
    x = tl.load(x_ptr + at + c, mask=there, other=0.0).to(tl.float32)
    if ADD:
        sum_ptr = residual_ptr + row.to(tl.int64) * residual_row + c
        rounded = (x + tl.load(sum_ptr, mask=there, other=0.0).to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        if SCALE:
            rounded = (rounded.to(tl.float32) * scale).to(residual_ptr.dtype.element_ty)
        tl.store(sum_ptr, rounded, mask=there)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + row % inner * WEIGHT_ROW + c, mask=there, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * weight
    tl.store(out_ptr + row.to(tl.int64) * COLUMNS + c, y.to(out_ptr.dtype.element_ty), mask=there)
