"""A base linear over 8-bit floats (e4m3) in Triton: y[m, n] = Σ_k x[m, k] · w[n, k] + bias[n], with
w[n, k] = values[n, k] · scales[k // group, n].

A weight is made in float32 in registers and rounded to the dtype of x, as in `triton_groups`, whose form this has:
yᵀ = w · xᵀ, and K in splits that follow from the weight alone, so that a row's bits do not depend on the rows beside
it, nor on their number. To scale sums instead would round no weight. But where one program adds up all splits, the
compiler joins the scaling and the addition, and gave other bits than splits that are programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear import triton_splits
from loraplex.kernels.linear.stored import FloatWeight
from loraplex.kernels.linear.triton_groups import choose_tiling
from loraplex.kernels.linear.triton_splits import (
    Launch,
    SplitLinear,
    SplitTiling,
    awaited,
    store_sums,
    tile_places,
)
from loraplex.kernels.weight_form import fits_tiles

_FLOATS = (8, 9)
"""Compute capability from which a GPU converts e4m3."""
_BLOCK_K = 128
"""Inputs at a time in 16 bits: a row of them is a whole line of memory. With 64 the products for 16 rows of an 8B
model's linears took 1.0 to 1.5 times as long on an H200 (docs/lab/README.md)."""


@dataclass(frozen=True, slots=True)
class PackedFloats(SplitLinear):
    """`values` [N, K] float8_e4m3fn and `scales` [G, N] float32 on the device. `converts`: the device has instructions
    for e4m3. `activations`: x may be rounded to e4m3 too. `one`: 1 in float32."""

    values: torch.Tensor
    scales: torch.Tensor
    converts: bool
    activations: bool
    one: torch.Tensor

    def choose_tiling(self, rows: int) -> SplitTiling:
        return floats_tiling(rows, self.shape, self.group, self.dtype.itemsize)

    def launch(self, x: torch.Tensor, tiling: SplitTiling) -> Launch:
        values = self.values if self.converts else self.values.view(torch.uint8)
        whole = self.shape[1] % tiling.block_k == 0
        return floats_program, (values, self.scales), {"WHOLE": whole, "CONVERTS": self.converts}


def pack_floats(weight: FloatWeight, dtype: torch.dtype, *, device: torch.device) -> PackedFloats:
    """The weight on `device`. Raises ValueError where its groups are not `fits_tiles`."""
    columns, inputs = weight.values.shape
    if not fits_tiles(weight.group, inputs):
        raise ValueError(f"groups of {weight.group} of {inputs} inputs fit no tile")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return PackedFloats(
        (columns, inputs),
        dtype,
        weight.group,
        triton_splits.new_counts(columns, device),
        weight.values.to(device).contiguous(),
        weight.scales.to(device).T.contiguous(),
        converts=capability >= _FLOATS,
        activations=weight.activations,
        one=torch.ones((), device=device),
    )


def floats_tiling(rows: int, shape: tuple[int, int], group: int, itemsize: int) -> SplitTiling:
    """The tiling of `triton_groups.choose_tiling`, by more of K at a time. What decides the order of a row's sums
    follows from the weight alone."""
    tiling = choose_tiling(rows, shape, group, itemsize)
    if itemsize > 2 or (group != shape[1] and group % _BLOCK_K):
        return tiling
    return replace(tiling, block_k=_BLOCK_K)


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def floats_program(
    x_ptr,
    values_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    num_rows,
    N,
    K,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """x [num_rows, K], values [N, K] e4m3, or their bytes where not CONVERTS, scales [K / GROUP, N],
    y [num_rows, N], planes and arrived as `store_sums` says, used only where APART. WHOLE: BLOCK_K divides K. Grid:
    tiles, those of the same columns beside each other, so that values come from memory once; splits of K where APART,
    else 1."""
    m, n, has_row, has_column = tile_places(num_rows, N, BLOCK_M, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    values_at = values_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    if APART or SPLITS == 1:
        total = _sum_split(
            x_at, values_at, scales_ptr + n, has_row, has_column, k, tl.program_id(1), N, K,
            GROUP, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PRECISION, AWAIT, CONVERTS,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            total += _sum_split(
                x_at, values_at, scales_ptr + n, has_row, has_column, k, split, N, K,
                GROUP, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, PRECISION, AWAIT, CONVERTS,
            )  # fmt: skip
    store_sums(
        total, bias_ptr, y_ptr, planes_ptr, arrived_ptr, m, n, has_row, has_column, num_rows, N,
        BLOCK_M, BLOCK_N, SPLITS, APART, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _sum_split(
    x_at,
    values_at,
    scales_at,
    has_row,
    has_column,
    k,
    split,
    N,
    K,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
    CONVERTS: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: Σ_k w[n, k] · x[m, k] over the blocks of K of one split."""
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(split * each, tl.minimum(split * each + each, blocks)):
        first = block * BLOCK_K
        # Where BLOCK_K divides K the mask over K is true for every lane, and the compiler drops it.
        there = k < BLOCK_K if WHOLE else first + k < K
        x = tl.load(x_at + first, has_row[None, :] & there[:, None], 0.0)
        values = tl.load(values_at + first, has_column[:, None] & there[None, :], 0.0)
        scale = tl.load(scales_at + first // GROUP * N, has_column, 0.0)
        weight = (_widened(values, CONVERTS) * scale[:, None]).to(x.dtype)
        total = awaited(tl.dot(weight, x, total, input_precision=PRECISION), AWAIT)
    return total


@triton.jit
def _widened(values, CONVERTS: tl.constexpr):
    """e4m3, or its bytes where not CONVERTS, in float32: exact."""
    if CONVERTS:
        wide = values.to(tl.float32)
    else:
        # The bits of a float16 that is 2⁸ times as small: its exponent has another bias, subnormal numbers too.
        bits = values.to(tl.uint16)
        small = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True)
        wide = small.to(tl.float32) * 256.0
    return wide
