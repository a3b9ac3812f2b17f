"""A base linear over codes of 4 bits in groups, in Triton: the product of `triton_groups`, with the same weights to the
bit, from half the bytes.

A word of 16 bits holds a code of each of four planes: in a block of K, plane p holds the inputs p·W … (p+1)·W-1, and
word j their inputs j. A plane lies in one group, is multiplied by x's rows of that plane, and needs no shuffle.
Planes come in the order of K: sums have the order that 8-bit codes in blocks of W have.

A code gets to be a float by bit patterns: bits below a float's exponent are a whole number. Where a scale has the 11
bits of a float16 and there are no offsets, two weights of bfloat16 are made at once: code · (high + low) is rounded
once, as it is in float32, for code · low has 7 bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loraplex.kernels.linear.groups import GroupedWeight

PLANES = 4
_LEAST_WIDTH = 16
"""Inputs of a plane, at least: a tensor core takes no fewer."""
_LEAST_COLUMNS = 16
_SIGNED = 8
"""Added to signed codes, to make them whole numbers from 0 on."""


@dataclass(frozen=True, slots=True)
class PackedNibbles:
    """`words` [N, K / 4] int16, `scales` and `offsets` [G, N], of the narrowest float type that holds all of them, on
    the device. `low`: the code that a nibble of 0 is. `block`: inputs of a block. `dtype` is that of x and y.

    `arrived` as in `triton_groups.PackedCodes`.
    """

    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int
    block: int
    low: int
    dtype: torch.dtype
    most_rows: int
    arrived: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, words = self.words.shape
        return rows, words * PLANES


@dataclass(frozen=True, slots=True)
class NibblesTiling:
    """A program computes `block_n` columns of `block_m` rows, a block of K at a time: powers of two, 16 or more.
    `apart`: each of the `splits` of K is a program of its own. All rows lie in one tile then. `pairs`: two weights are
    made at once, where the weight allows it. `ahead`: scales are loaded a block ahead."""

    block_m: int
    block_n: int
    splits: int
    apart: bool
    num_warps: int
    num_stages: int = 3
    pairs: bool = True
    ahead: bool = True


def pack_nibbles(
    weight: GroupedWeight, dtype: torch.dtype, *, device: torch.device, block: int = 128
) -> PackedNibbles | None:
    """The weight on `device`; None where a code needs more than 4 bits, or a plane of `block` inputs is not part of a
    group."""
    rows, inputs = weight.shape
    width = block // PLANES
    if inputs % block or weight.group % width or width < _LEAST_WIDTH:
        return None
    least, most = (int(found) for found in weight.codes.aminmax())
    low = 0 if least >= 0 else -_SIGNED
    if least < low or most > low + 15:
        return None
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    offsets = None if weight.offsets is None else _narrow(weight.offsets).to(device).T.contiguous()
    planes = (weight.codes.to(device).int() - low).view(rows, inputs // block, PLANES, width)
    words = planes[:, :, 0] | planes[:, :, 1] << 4 | planes[:, :, 2] << 8 | planes[:, :, 3] << 12
    return PackedNibbles(
        words.to(torch.int16).view(rows, inputs // PLANES),
        _narrow(weight.scales).to(device).T.contiguous(),
        offsets,
        weight.group,
        block,
        low,
        dtype,
        most_rows=256 if hopper else 128,
        arrived=torch.zeros(triton.cdiv(rows, _LEAST_COLUMNS), dtype=torch.int32, device=device),
    )


def _narrow(values: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits, if those hold them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.float(), values):
            return narrow
    return values


def linear(
    x: torch.Tensor,
    weight: PackedNibbles,
    bias: torch.Tensor | None = None,
    *,
    tiling: NibblesTiling,
) -> torch.Tensor:
    """The product, as `triton_groups.linear` has it."""
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
        tiles = triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(out_features, tiling.block_n)
        planes = weight.scales
        if tiling.apart:
            planes = torch.empty(tiling.splits, num_rows, out_features, dtype=torch.float32, device=x.device)
        nibbles_program[tiles, tiling.splits if tiling.apart else 1](
            x,
            weight.words,
            weight.scales,
            weight.scales if weight.offsets is None else weight.offsets,
            x if bias is None else bias,
            y,
            planes,
            weight.arrived,
            num_rows,
            out_features,
            in_features,
            GROUP=weight.group,
            LOW=weight.low,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=weight.block,
            SPLITS=tiling.splits,
            APART=tiling.apart,
            HAS_OFFSETS=weight.offsets is not None,
            HAS_BIAS=bias is not None,
            PAIRS=tiling.pairs and x.is_cuda and makes_pairs(weight),
            AHEAD=tiling.ahead,
            # TF32 would cost float32 half its digits.
            PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            AWAIT=x.is_cuda,  # the interpreter knows no assembler
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
    return y


def makes_pairs(weight: PackedNibbles) -> bool:
    """Whether two weights can be made at once."""
    return (
        weight.dtype is torch.bfloat16 and weight.scales.dtype is not torch.float32 and weight.offsets is None
    )


# One machine code for all numbers of rows.
@triton.jit(do_not_specialize=["num_rows"])
def nibbles_program(
    x_ptr,
    words_ptr,
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
    LOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """x [num_rows, K], words [N, K / 4], scales and offsets [K / GROUP, N], y [num_rows, N], planes [SPLITS, num_rows,
    N] and arrived as in PackedNibbles, both used only where APART. Grid: tiles, those of the same columns beside each
    other, so that words come from memory once; splits of K where APART, else 1."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    m = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row, has_column = m < num_rows, n < N
    k = tl.arange(0, WIDTH)
    x_at = x_ptr + m.to(tl.int64)[None, :] * K + k[:, None]
    words_at = words_ptr + n.to(tl.int64)[:, None] * (K // 4) + k[None, :]
    if APART or SPLITS == 1:
        total = _sum_split(
            x_at, words_at, scales_ptr + n, offsets_ptr + n, has_row, has_column, tl.program_id(1), N, K,
            GROUP, LOW, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, PAIRS, AHEAD, PRECISION, AWAIT,
        )  # fmt: skip
    else:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for split in range(SPLITS):
            total += _sum_split(
                x_at, words_at, scales_ptr + n, offsets_ptr + n, has_row, has_column, split, N, K,
                GROUP, LOW, BLOCK_M, BLOCK_N, BLOCK_K, SPLITS, HAS_OFFSETS, PAIRS, AHEAD, PRECISION, AWAIT,
            )  # fmt: skip
    y_at = m.to(tl.int64)[None, :] * N + n[:, None]
    here = has_column[:, None] & has_row[None, :]
    is_last = True
    if APART:
        plane = num_rows.to(tl.int64) * N
        tl.store(planes_ptr + tl.program_id(1) * plane + y_at, total, here)
        # All threads have stored before one of them tells the other programs, and none reads before that one knows.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for split in range(SPLITS):
                total += tl.load(planes_ptr + split * plane + y_at, here, 0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, has_column, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + y_at, total.to(y_ptr.dtype.element_ty), here)


@triton.jit
def _sum_split(
    x_at,
    words_at,
    scales_at,
    offsets_at,
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
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    AWAIT: tl.constexpr,
):
    """[BLOCK_N, BLOCK_M] float32: Σ_k w[n, k] · x[m, k] over the blocks of K of one split."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    blocks = K // BLOCK_K
    each = tl.cdiv(blocks, SPLITS)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    last = tl.minimum(split * each + each, blocks)
    first = tl.minimum(split * each, blocks - 1)  # some splits may have no block
    scales = _load_groups(scales_at, first, has_column, N, GROUP, BLOCK_K)
    offsets = scales
    if HAS_OFFSETS:
        offsets = _load_groups(offsets_at, first, has_column, N, GROUP, BLOCK_K)
    for block in range(split * each, last):
        words = tl.load(words_at + block * WIDTH, has_column[:, None], 0)
        if AHEAD:
            following = tl.minimum(block + 1, last - 1)
            next_scales = _load_groups(scales_at, following, has_column, N, GROUP, BLOCK_K)
            next_offsets = next_scales
            if HAS_OFFSETS:
                next_offsets = _load_groups(offsets_at, following, has_column, N, GROUP, BLOCK_K)
        else:
            scales = _load_groups(scales_at, block, has_column, N, GROUP, BLOCK_K)
            offsets = scales
            if HAS_OFFSETS:
                offsets = _load_groups(offsets_at, block, has_column, N, GROUP, BLOCK_K)
        for plane in tl.static_range(4):
            x = tl.load(x_at + (block * BLOCK_K + plane * WIDTH), has_row[None, :], 0.0)
            if PAIRS:
                high = scales[plane].to(tl.bfloat16)
                low = (scales[plane].to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)
                weight = _two_weights(words, high[:, None], low[:, None], plane, LOW)
            else:
                weight = _weights(words, scales[plane], offsets[plane], plane, LOW, HAS_OFFSETS).to(x.dtype)
            total = tl.dot(weight, x, total, input_precision=PRECISION)
            if AWAIT:
                # See triton_groups.
                total = tl.inline_asm_elementwise("", "=f,0", [total], tl.float32, is_pure=True, pack=1)
        if AHEAD:
            scales, offsets = next_scales, next_offsets
    return total


@triton.jit
def _load_groups(at, block, has_column, N, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Four times [BLOCK_N]: what belongs to the group of each plane of a block."""
    WIDTH: tl.constexpr = BLOCK_K // 4
    first = block * BLOCK_K
    a = tl.load(at + first // GROUP * N, has_column, 0.0)
    if GROUP % BLOCK_K == 0:
        return a, a, a, a
    c = tl.load(at + (first + 2 * WIDTH) // GROUP * N, has_column, 0.0)
    if GROUP == 2 * WIDTH:
        return a, a, c, c
    b = tl.load(at + (first + WIDTH) // GROUP * N, has_column, 0.0)
    d = tl.load(at + (first + 3 * WIDTH) // GROUP * N, has_column, 0.0)
    return a, b, c, d


@triton.jit
def _weights(words, scale, offset, PLANE: tl.constexpr, LOW: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """float32. The number that a nibble in its place stands for is 16^PLANE times the code; so the scale is divided by
    that, and no bit of the product changes."""
    TIMES: tl.constexpr = 1 << (4 * PLANE)
    EXPONENT: tl.constexpr = 0x4B000000  # of 2^23, whose last bit counts 1
    bits = (words.to(tl.int32) & (15 * TIMES)) | EXPONENT
    code = bits.to(tl.float32, bitcast=True) - (8388608.0 - LOW * TIMES)
    scale = scale.to(tl.float32) * (1.0 / TIMES)
    return tl.fma(code, scale[:, None], offset[:, None]) if HAS_OFFSETS else code * scale[:, None]


@triton.jit
def _two_weights(words, high, low, PLANE: tl.constexpr, LOW: tl.constexpr):
    """bfloat16: code · high + code · low, rounded once. 0x4300 is the exponent of 128, whose last bit counts 1."""
    NEGATIVE: tl.constexpr = "0xC300C300" if LOW == 0 else "0xC308C308"  # -128, -136
    SHIFT: tl.constexpr = "0" if PLANE == 0 else "4" if PLANE == 1 else "8" if PLANE == 2 else "12"
    return tl.inline_asm_elementwise(
        "{ .reg .b32 code, mask, more, one, less, none, part;\n"
        "shr.u32 code, $1, " + SHIFT + ";\n"
        "mov.b32 mask, 0x000F000F; mov.b32 more, 0x43004300; mov.b32 one, 0x3F803F80;\n"
        "mov.b32 less, " + NEGATIVE + "; mov.b32 none, 0x80008000;\n"
        "lop3.b32 code, code, mask, more, 0xEA;\n"
        "fma.rn.bf16x2 code, code, one, less;\n"
        "fma.rn.bf16x2 part, code, $3, none;\n"
        "fma.rn.bf16x2 $0, code, $2, part; }",
        "=r,r,r,r",
        [words, high, low],
        tl.bfloat16,
        is_pure=True,
        pack=2,
    )
