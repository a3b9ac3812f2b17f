"""A base linear over codes in groups, in Triton: y[m, n] = Σ_k x[m, k] · w[n, k] + bias[n], with
w[n, k] = codes[n, k] · scales[n, k // group] + offsets[n, k // group].

A weight is made in float32 and rounded to the dtype of x in registers: it is what a 16-bit checkpoint of the same
weights holds. Hopper's tensor cores take their first operand from registers and the second one from shared memory
alone. So a program computes yᵀ = w · xᵀ: weights, once made, need not go back to shared memory.

K is cut into splits, whose sums are added in their order. Splits and blocks of K follow from the weight alone, and each
tile adds the same products in the same order: a row's bits do not depend on the rows beside it, nor on their number.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear import triton_splits
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.linear.triton_splits import (
    Launch,
    SplitLinear,
    SplitTiling,
    awaited,
    store_sums,
    tile_places,
)

_LEAST_BLOCK_K, _MOST_BLOCK_K = 16, 64


@dataclass(frozen=True, slots=True)
class PackedCodes(SplitLinear):
    """`codes` [N, K] int8, `scales` and `offsets` [G, N] float32, on the device: a tile's scales lie side by side.
    `most_rows`: rows of a tile on this device, at most."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    most_rows: int

    def choose_tiling(self, rows: int) -> SplitTiling:
        return choose_tiling(rows, self.shape, self.group, self.dtype.itemsize, most_rows=self.most_rows)

    def launch(self, x: torch.Tensor, tiling: SplitTiling) -> Launch:
        offsets = self.scales if self.offsets is None else self.offsets
        return (
            groups_program,
            (self.codes, self.scales, offsets),
            {"HAS_OFFSETS": self.offsets is not None},
        )


def pack_groups(weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device) -> PackedCodes:
    """The weight on `device`."""
    return PackedCodes(
        weight.shape,
        dtype,
        weight.group,
        triton_splits.new_counts(weight.shape[0], device),
        weight.codes.to(device).contiguous(),
        weight.scales.to(device).T.contiguous(),
        None if weight.offsets is None else weight.offsets.to(device).T.contiguous(),
        triton_splits.most_rows(device),
    )


def choose_tiling(
    rows: int, shape: tuple[int, int], group: int, itemsize: int, *, most_rows: int = 128
) -> SplitTiling:
    """The tiling for x of `rows` rows, of elements of `itemsize` bytes, and a weight of `shape` [N, K]. A block of K
    lies in one group. What decides the order of a row's sums, `block_k` and `splits`, follows from the weight alone."""
    out_features, _ = shape
    block_k = min(max(triton.next_power_of_2(group), _LEAST_BLOCK_K), _MOST_BLOCK_K)
    splits = triton_splits.num_splits(shape)
    if itemsize > 2:  # float32 goes without tensor cores
        block_m, block_n, num_warps = 16 if rows <= 16 else 32, 32, 4
        block_k = min(block_k, 32)
    else:
        block_m = next((size for size in (16, 32, 64, 128) if rows <= size), most_rows)
        # A wide tile reads x less often. It pays for many rows, and for few where every multiprocessor gets one.
        is_wide = rows > 64 or (rows > 16 and out_features * splits >= 28672)
        block_n, num_warps = (128, 8) if is_wide else (64, 4)
    apart = triton_splits.are_apart(splits, rows, out_features, block_m)
    if splits > 1 and not apart:
        # Sums of one split beside those of all before it take twice the registers.
        block_m = min(block_m, 128)
    return SplitTiling(block_m, block_n, block_k, splits, apart, num_warps)


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def groups_program(
    x_ptr,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    num_rows,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """x [num_rows, K], codes [N, K], scales and offsets [K / GROUP, N], y [num_rows, N], planes [SPLITS, num_rows, N]
    and arrived as in SplitLinear, both used only where APART. Grid: tiles, those of the same columns beside each other,
    so that codes come from memory once; splits of K where APART, else 1."""
    m, n, has_row, has_column = tile_places(num_rows, N, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    codes_at = codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if APART or SPLITS == 1:
        total = _sum_split(
            x_at, codes_at, scales_ptr + n, offsets_ptr + n, has_row, has_column, k, tl.program_id(1), N, K,
            GROUP, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, PRECISION, AWAIT,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            total += _sum_split(
                x_at, codes_at, scales_ptr + n, offsets_ptr + n, has_row, has_column, k, split, N, K,
                GROUP, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, PRECISION, AWAIT,
            )  # fmt: skip
    store_sums(
        total, bias_ptr, y_ptr, planes_ptr, arrived_ptr, m, n, has_row, has_column, num_rows, N,
        BLOCK_M, BLOCK_N, SPLITS, APART, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _sum_split(
    x_at,
    codes_at,
    scales_at,
    offsets_at,
    has_row,
    has_column,
    k,
    split,
    N,
    K,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: Σ_k w[n, k] · x[m, k] over the blocks of K of one split."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_K - 1) // BLOCK_K
    blocks = K // GROUP * BLOCKS
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        group = block // BLOCKS
        inside = block % BLOCKS * BLOCK_K
        first = group * GROUP + inside
        # Where BLOCK_K divides a group the mask over K is true for every lane, and the compiler drops it.
        there = inside + k < GROUP if GROUP % BLOCK_K else k < BLOCK_K
        x = tl.load(x_at + first, has_row[None, :] & there[:, None], 0.0)
        codes = tl.load(codes_at + first, has_column[:, None] & there[None, :], 0)
        weight = codes.to(tl.float32)
        scale = tl.load(scales_at + group * N, has_column, 0.0)
        if HAS_OFFSETS:
            offset = tl.load(offsets_at + group * N, has_column, 0.0)
            weight = tl.fma(weight, scale[:, None], offset[:, None])
        else:
            weight *= scale[:, None]
        total = awaited(tl.dot(weight.to(x.dtype), x, total, input_precision=PRECISION), AWAIT)
    return total
