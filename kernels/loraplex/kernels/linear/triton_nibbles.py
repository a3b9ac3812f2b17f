"""A base linear over codes of 4 bits in groups, in Triton: the product of `triton_groups`, with the same weights to the
bit, from half the bytes.

A word of 16 bits holds a code of each of four planes: in a block of K, plane p holds the inputs p·W … (p+1)·W-1, and
word j their inputs j. A plane lies in one group. A thread holds the same places of each plane, so that planes beside
each other are a block without a shuffle, and sums have the order that they have with 8-bit codes.

A code gets to be a float by bit patterns: bits below a float's exponent are a whole number. Where a scale has the 11
bits of a float16 and there are no offsets, two weights of bfloat16 are made at once: code · (high + rest) is rounded
once, as it is in float32, for code · rest has 7 bits.
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
from loraplex.kernels.weight_form import PLANES, block_of_4_bits

_MOST_NIBBLE = 15
_SIGNED = 8
"""Added to codes of both signs, to make them whole numbers from 0 on."""


@dataclass(frozen=True, slots=True)
class PackedNibbles(SplitLinear):
    """`words` [N, K / 4] int16, `scales` and `offsets` [G, N] of the narrowest floats that hold all of them, on the
    device. A nibble of 0 is the code `low`, or, where `lows` [G, N] int8 is there, that of its group. `block`: inputs
    of a block. `most_rows` as in `triton_groups.PackedCodes`."""

    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    most_rows: int
    lows: torch.Tensor | None
    low: int
    block: int

    @property
    def makes_pairs(self) -> bool:
        """Whether two weights can be made at once."""
        is_narrow = self.scales.dtype is not torch.float32 and self.offsets is None
        return is_narrow and self.dtype is torch.bfloat16

    def choose_tiling(self, rows: int) -> SplitTiling:
        return choose_tiling(rows, self.shape, self.block, self.dtype.itemsize, most_rows=self.most_rows)

    def launch(self, x: torch.Tensor, tiling: SplitTiling) -> Launch:
        offsets = self.scales if self.offsets is None else self.offsets
        lows = self.words if self.lows is None else self.lows
        constants = {
            "LOW": self.low,
            "HAS_OFFSETS": self.offsets is not None,
            "HAS_LOWS": self.lows is not None,
            "PAIRS": x.is_cuda and self.makes_pairs,
        }
        return nibbles_program, (self.words, self.scales, offsets, lows), constants


def pack_nibbles(weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device) -> PackedNibbles | None:
    """The weight on `device`; None where the codes of a group need more than 4 bits, or no block fits the weight."""
    rows, inputs = weight.shape
    block = block_of_4_bits(inputs, weight.group)
    if block is None:
        return None
    codes = weight.codes.to(device).view(rows, -1, weight.group)
    least, most = codes.amin(2), codes.amax(2)
    if int((most.short() - least).max()) > _MOST_NIBBLE:
        return None
    low, lows = 0 if int(least.min()) >= 0 else -_SIGNED, None
    if int(least.min()) < low or int(most.max()) > low + _MOST_NIBBLE:
        lows = least
    nibbles = codes - (low if lows is None else lows[:, :, None])
    planes = nibbles.view(rows, inputs // block, PLANES, block // PLANES)
    bytes_ = [planes[:, :, place] | planes[:, :, place + 1] << 4 for place in (0, 2)]
    return PackedNibbles(
        weight.shape,
        dtype,
        weight.group,
        triton_splits.new_counts(rows, device),
        torch.stack(bytes_, -1).view(torch.int16).view(rows, inputs // PLANES),
        _narrow(weight.scales.to(device)).T.contiguous(),
        None if weight.offsets is None else _narrow(weight.offsets.to(device)).T.contiguous(),
        triton_splits.most_rows(device),
        None if lows is None else lows.T.contiguous(),
        low,
        block,
    )


def _narrow(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits, if those hold them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values


def choose_tiling(
    rows: int, shape: tuple[int, int], block: int, itemsize: int, *, most_rows: int = 128
) -> SplitTiling:
    """The tiling for x of `rows` rows, of elements of `itemsize` bytes, and a weight of `shape` [N, K] in blocks of
    `block` inputs. `splits`, which decides the order of a row's sums, follows from the weight alone."""
    out_features, _ = shape
    splits = triton_splits.num_splits(shape)
    if itemsize > 2:  # float32 goes without tensor cores
        block_m, block_n, num_warps = 16 if rows <= 16 else 32, 32, 4
    else:
        block_m = next((size for size in (16, 32, 64, 128) if rows <= size), most_rows)
        block_n, num_warps = (64, 4) if rows <= 64 and splits > 1 else (128, 4 if rows <= 16 else 8)
    if splits > 1:
        # Sums of one split beside those of all before it take twice the registers.
        block_m = min(block_m, most_rows // 2)
    apart = triton_splits.are_apart(splits, rows, out_features, block_m)
    return SplitTiling(block_m, block_n, block, splits, apart, num_warps)


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def nibbles_program(
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    lows_ptr,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    num_rows,
    N,
    K,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_LOWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """x [num_rows, K], words [N, K / 4], scales, offsets and lows [K / GROUP, N], y [num_rows, N], planes [SPLITS,
    num_rows, N] and arrived as in SplitLinear, both used only where APART. Grid: tiles, those of the same columns
    beside each other, so that words come from memory once; splits of K where APART, else 1."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    m, n, has_row, has_column = tile_places(num_rows, N, BLOCK_M, BLOCK_N)
    x_at = x_ptr + m.to(tl.int64)[None, :] * K + tl.arange(0, BLOCK_K)[:, None]
    words_at = words_ptr + n.to(tl.int64)[:, None] * (K // 4) + tl.arange(0, WIDTH)[None, :]
    if APART or SPLITS == 1:
        total = _sum_split(
            x_at, words_at, scales_ptr + n, offsets_ptr + n, lows_ptr + n, has_row, has_column, tl.program_id(1), N, K,
            GROUP, LOW, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, HAS_LOWS, PAIRS, PRECISION, AWAIT,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            total += _sum_split(
                x_at, words_at, scales_ptr + n, offsets_ptr + n, lows_ptr + n, has_row, has_column, split, N, K,
                GROUP, LOW, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, HAS_LOWS, PAIRS, PRECISION, AWAIT,
            )  # fmt: skip
    store_sums(
        total, bias_ptr, y_ptr, planes_ptr, arrived_ptr, m, n, has_row, has_column, num_rows, N,
        BLOCK_M, BLOCK_N, SPLITS, APART, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def _sum_split(
    x_at,
    words_at,
    scales_at,
    offsets_at,
    lows_at,
    has_row,
    has_column,
    split,
    N,
    K,
    GROUP: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_LOWS: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: Σ_k w[n, k] · x[m, k] over the blocks of K of one split."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    blocks = K // BLOCK_K
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    last = tl.minimum(split * each + each, blocks)
    for block in range(split * each, last):
        x = tl.load(x_at + block * BLOCK_K, has_row[None, :], 0.0)
        words = tl.load(words_at + block * WIDTH, has_column[:, None], 0)
        scales = _load_planes(scales_at, block, has_column, N, GROUP, BLOCK_K)
        offsets, lows = scales, scales
        if HAS_OFFSETS:
            offsets = _load_planes(offsets_at, block, has_column, N, GROUP, BLOCK_K)
        if HAS_LOWS:
            lows = _load_planes(lows_at, block, has_column, N, GROUP, BLOCK_K)
        a = _plane(words, scales, offsets, lows, 0, LOW, HAS_OFFSETS, HAS_LOWS, PAIRS, x.dtype)
        b = _plane(words, scales, offsets, lows, 1, LOW, HAS_OFFSETS, HAS_LOWS, PAIRS, x.dtype)
        c = _plane(words, scales, offsets, lows, 2, LOW, HAS_OFFSETS, HAS_LOWS, PAIRS, x.dtype)
        d = _plane(words, scales, offsets, lows, 3, LOW, HAS_OFFSETS, HAS_LOWS, PAIRS, x.dtype)
        # [BLOCK_N, WIDTH, 2, 2] to [BLOCK_N, BLOCK_K]: no number leaves its register.
        planes = tl.join(tl.join(a, c), tl.join(b, d))
        weight = tl.reshape(tl.permute(planes, (0, 2, 3, 1)), (BLOCK_N, BLOCK_K))
        total = awaited(tl.dot(weight, x, total, input_precision=PRECISION), AWAIT)
    return total


@triton.jit
def _load_planes(at, block, has_column, N, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Four times [BLOCK_N]: what belongs to the group of each plane of a block."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    first = block * BLOCK_K
    a = tl.load(at + first // GROUP * N, has_column, 0)
    if GROUP % BLOCK_K == 0:
        return a, a, a, a
    c = tl.load(at + (first + 2 * WIDTH) // GROUP * N, has_column, 0)
    if GROUP == 2 * WIDTH:
        return a, a, c, c
    b = tl.load(at + (first + WIDTH) // GROUP * N, has_column, 0)
    d = tl.load(at + (first + 3 * WIDTH) // GROUP * N, has_column, 0)
    return a, b, c, d


@triton.jit
def _plane(
    words,
    scales,
    offsets,
    lows,
    PLANE: tl.constexpr,
    LOW: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_LOWS: tl.constexpr,
    PAIRS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The weights of a plane."""
    low = lows[PLANE].to(tl.float32)[:, None] if HAS_LOWS else LOW
    if PAIRS:
        return _two_weights(words, scales[PLANE], low, PLANE)
    return _weights(words, scales[PLANE], offsets[PLANE], low, PLANE, HAS_OFFSETS).to(DTYPE)


@triton.jit
def _weights(words, scale, offset, low, PLANE: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """float32. The number that a nibble in its place stands for is 16^PLANE times the code; so the scale is divided by
    that, and no bit of the product changes."""
    TIMES: tl.constexpr = 1 << (4 * PLANE)
    EXPONENT: tl.constexpr = 0x4B000000  # of 2^23, whose last bit counts 1
    bits = (words.to(tl.int32) & (15 * TIMES)) | EXPONENT
    code = bits.to(tl.float32, bitcast=True) - (8388608.0 - low * TIMES)
    scale = scale.to(tl.float32) * (1.0 / TIMES)
    if HAS_OFFSETS:
        return tl.fma(code, scale[:, None], offset.to(tl.float32)[:, None])
    return code * scale[:, None]


@triton.jit
def _two_weights(words, scale, low, PLANE: tl.constexpr):
    """bfloat16: code · high + code · rest, rounded once. 0x4300 is the exponent of 128, whose last bit counts 1."""
    SHIFT: tl.constexpr = "0" if PLANE == 0 else "4" if PLANE == 1 else "8" if PLANE == 2 else "12"
    high = scale.to(tl.bfloat16)
    rest = (scale.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 code, mask, more, one, none, part;\n"
        "shr.u32 code, $1, " + SHIFT + ";\n"
        "mov.b32 mask, 0x000F000F; mov.b32 more, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 none, 0x80008000;\n"
        "lop3.b32 code, code, mask, more, 0xEA;\n"
        "fma.rn.bf16x2 code, code, one, $4;\n"
        "fma.rn.bf16x2 part, code, $3, none;\n"
        "fma.rn.bf16x2 $0, code, $2, part; }",
        "=r,r,r,r,r",
        [words, high[:, None], rest[:, None], (low + tl.full((1, 1), -128.0, tl.float32)).to(tl.bfloat16)],
        tl.bfloat16,
        is_pure=True,
        pack=2,
    )
