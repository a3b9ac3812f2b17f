"""A base linear over codes in groups, in Triton: y[m, n] = Σ_g (scales[n, g] · Σ_{k in g} x[m, k] · codes[n, k]
+ offsets[n, g] · Σ_{k in g} x[m, k]) + bias[n].

A code is a small whole number, which the dtype of x holds, so that products are exact; a block's are summed in float32
before its scale comes to them. Tiles and the order over K follow from the weight alone, as `triton_dense`'s do: a row's
bits do not depend on the rows beside it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear.groups import GroupedWeight
from loraplex.kernels.linear.triton_dense import LinearTiling

_LEAST_BLOCK_K, _MOST_BLOCK_K = 16, 128


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """`codes` [N, K] int8, `scales` and `offsets` [G, N] float32, on the device: a tile's scales lie side by side.
    `dtype` is that of x and y."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, inputs = self.codes.shape
        return rows, inputs


def pack_groups(weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device) -> PackedCodes:
    """The weight on `device`."""
    offsets = None if weight.offsets is None else weight.offsets.to(device).T.contiguous()
    return PackedCodes(
        weight.codes.to(device).contiguous(),
        weight.scales.to(device).T.contiguous(),
        offsets,
        weight.group,
        dtype,
    )


def choose_tiling(out_features: int, group: int, itemsize: int) -> LinearTiling:
    """The tiling by the weight alone; a block of K lies in one group."""
    block_k = min(max(triton.next_power_of_2(group), _LEAST_BLOCK_K), _MOST_BLOCK_K)
    if itemsize > 2:  # float32 goes without tensor cores
        return LinearTiling(32, 32, min(block_k, 32), num_warps=4, num_stages=3)
    return LinearTiling(64, 64 if out_features >= 8192 else 32, block_k, num_warps=4, num_stages=4)


def linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None = None,
    *,
    tiling: LinearTiling | None = None,
) -> torch.Tensor:
    """x [..., K], bias [N] or None → [..., N], of the weight's dtype, contiguous. Sums are float32, rounded once,
    behind the bias. `tiling` is for tests. Raises ValueError for other shapes and strides."""
    out_features, in_features = weight.shape
    if (
        x.shape[-1] != in_features
        or x.dtype is not weight.dtype
        or not x.is_contiguous()
        or (bias is not None and (bias.shape != (out_features,) or bias.dtype is not weight.dtype))
    ):
        raise ValueError(
            f"no product of {list(x.shape)} {x.dtype} with codes {list(weight.shape)} for {weight.dtype}"
        )
    y = torch.empty(*x.shape[:-1], out_features, dtype=x.dtype, device=x.device)
    num_rows = y.numel() // out_features
    if num_rows:
        tiling = tiling or choose_tiling(out_features, weight.group, x.element_size())
        tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(out_features, tiling.block_n)
        groups_program[(tiles,)](
            x,
            weight.codes,
            weight.scales,
            weight.scales if weight.offsets is None else weight.offsets,
            weight.scales if bias is None else bias,
            y,
            num_rows,
            out_features,
            in_features,
            GROUP=weight.group,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            HAS_OFFSETS=weight.offsets is not None,
            HAS_BIAS=bias is not None,
            # TF32 would cost float32 half its digits.
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return y


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def groups_program(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x [num_rows, K], codes [N, K], scales and offsets [K / GROUP, N], y [num_rows, N]. Grid: tiles; those of the same
    columns beside each other, so that codes come from memory once."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_K - 1) // BLOCK_K
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    m = tl.program_id(0) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_row, has_column = m < num_rows, n < N
    x_at = x_ptr + m.to(tl.int64)[:, None] * K + k[None, :]
    codes_at = codes_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(K // GROUP * BLOCKS):
        group = block // BLOCKS
        inside = block % BLOCKS * BLOCK_K
        first = group * GROUP + inside
        # Where BLOCK_K divides a group the mask over K is true for every lane, and the compiler drops it.
        there = inside + k < GROUP if GROUP % BLOCK_K else k < BLOCK_K
        x = tl.load(x_at + first, has_row[:, None] & there[None, :], 0.0)
        codes = tl.load(codes_at + first, has_column[None, :] & there[:, None], 0)
        scale = tl.load(scales_ptr + group * N + n, has_column, 0.0)
        product = tl.dot(x, codes.to(x.dtype), input_precision=PRECISION)
        total += product * scale[None, :]
        if HAS_OFFSETS:
            offset = tl.load(offsets_ptr + group * N + n, has_column, 0.0)
            total += tl.sum(x.to(tl.float32), 1)[:, None] * offset[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, has_column, 0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + m.to(tl.int64)[:, None] * N + n[None, :],
        total.to(y_ptr.dtype.element_ty),
        has_row[:, None] & has_column[None, :],
    )
