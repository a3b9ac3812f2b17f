"""A base linear in Triton whose rows have the same bits in every step (ADR 0040).

A library chooses the algorithm of a product by its number of rows, and with it the order of its sums. Here tiles,
instructions and the order over K follow from the weight alone, and K is not split: a row's sums are made in one order,
whichever rows are computed beside it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.linear.triton_splits import tile_places


@dataclass(frozen=True, slots=True)
class LinearTiling:
    """A program computes `block_m` rows of `block_n` columns, `block_k` of K at a time: powers of two, 16 or more."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PackedTiles(PackedLinear):
    """A weight in floats that this kernel multiplies with."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.weight, bias)


def pack_weight(weight: torch.Tensor) -> PackedTiles:
    """The weight as it is."""
    out_features, in_features = weight.shape
    return PackedTiles((out_features, in_features), weight.dtype, weight)


def choose_tiling(out_features: int, itemsize: int) -> LinearTiling:
    """The tiling by the weight alone. Few columns are dealt out in narrow tiles, so that decoding keeps more
    multiprocessors reading. 64 rows: what Hopper's own instruction takes at least."""
    if itemsize > 2:  # float32 goes without tensor cores
        return LinearTiling(32, 32, 32, num_warps=4, num_stages=3)
    if out_features >= 16384:
        return LinearTiling(64, 128, 64, num_warps=4, num_stages=4)
    if out_features >= 8192:
        return LinearTiling(64, 64, 128, num_warps=4, num_stages=4)
    return LinearTiling(64, 32, 128, num_warps=4, num_stages=4)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiling: LinearTiling | None = None,
) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] → [..., out], all of one dtype, contiguous. Sums in float32 from the
    first column to the last, the bias behind them, rounded once. `tiling` is for tests. Raises ValueError for other
    shapes and strides."""
    out_features, in_features = weight.shape
    if (
        x.shape[-1] != in_features
        or x.dtype is not weight.dtype
        or not (x.is_contiguous() and weight.is_contiguous())
        or (bias is not None and (bias.shape != (out_features,) or bias.dtype is not weight.dtype))
    ):
        raise ValueError(f"no product of {list(x.shape)} {x.dtype} with {list(weight.shape)} {weight.dtype}")
    y = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype, device=x.device)
    num_rows = y.numel() // out_features
    if num_rows:
        tiling = tiling or choose_tiling(out_features, weight.element_size())
        tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(out_features, tiling.block_n)
        linear_program[(tiles,)](
            x,
            weight,
            weight if bias is None else bias,
            y,
            num_rows,
            out_features,
            in_features,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            HAS_BIAS=bias is not None,
            # TF32 would cost float32 half its digits.
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return y


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def linear_program(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · weight[n, k] + bias[n]. x [num_rows, K], weight [N, K], y [num_rows, N]. Grid: tiles;
    those of the same columns beside each other, so that a weight comes from memory once."""
    m, n, has_row, has_column = tile_places(num_rows, N, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        there = first + k < K
        x = tl.load(x_at + first, has_row[:, None] & there[None, :], 0.0)
        weight = tl.load(weight_at + first, has_column[None, :] & there[:, None], 0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, has_column, 0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + m.to(tl.int64)[:, None] * N + n[None, :],
        total.to(y_ptr.dtype.element_ty),
        has_row[:, None] & has_column[None, :],
    )
