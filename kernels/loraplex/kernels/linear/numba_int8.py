"""Base linears over weights in groups, with 8-bit activations, on a CPU, compiled by numba.

Rows are quantised in groups of 32 inputs (`layers.numba_quantise`), a weight's codes have 4 or 8 bits, and their
products are summed as whole numbers (`int8_products`). Scales come to the sum of a group:

    y[r, n] = Σ_g offsets[n, g] · X[r, g]  +  Σ_g (scales[n, g] · S[r, g]) · (Σ_{k in g} codes[n, k] · q[r, k])
              +  bias[n]

with x[r, k] ≈ S[r, g] · q[r, k] and X[r, g] = S[r, g] · Σ_{k in g} q[r, k]. Sums over groups are float32, in the order
of the groups, and y is rounded once. So a row's result is bit-identical for any other rows and any threads."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.layers.numba_quantise import GROUP, RECORD, quantise_rows
from loraplex.kernels.linear.int8_products import PART_BYTES, STEP, products
from loraplex.kernels.linear.numba_blocks import (
    BlockedLinear,
    block_parts,
    block_width,
    for_each_count,
    in_blocks,
    part_of,
    rows_of_piece,
    store_tile,
    unit_spans,
)
from loraplex.kernels.linear.stored import GroupedWeight
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, num_threads, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, read_int64, size_of

_GROUP, _RECORD_BYTES = GROUP, 4 * RECORD
_MOST_CODE = 15
_BITS_LIKE = {4: np.uint8(0), 8: np.int8(0)}
"""The argument that stands for the bits of a code: code is made for each."""


@dataclass(frozen=True, slots=True)
class PackedIntegers(BlockedLinear):
    """`codes` [⌈N/B⌉, K/32 · bits, B, 4] uint8, two in a byte where they have 4 bits (`int8_products`); `scales` and
    `offsets` [⌈N/B⌉, G, B], float16 where that holds all of them, else float32; of B outputs each, zeros behind the N
    outputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int
    bits: int

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return (self.codes, self.scales, self.offsets)

    def multiply(self, x: torch.Tensor, bias: int, places: Sequence[int], pieces: int = 0) -> torch.Tensor:
        quantised = quantise_rows(x)
        rows, (columns, inputs) = x.shape[0], self.shape
        y = torch.empty(rows, columns, dtype=self.dtype)
        spans, grain = (0, 1) if pieces else unit_spans(rows, rows, len(self.codes), num_threads())
        _multiply.run(
            (LIKE[self.dtype], LIKE[self.scales.dtype], _BITS_LIKE[self.bits]),
            quantised.codes.data_ptr(),
            quantised.groups.data_ptr(),
            rows,
            *places,
            bias,
            y.data_ptr(),
            inputs,
            columns,
            self.group // GROUP,
            grain,
            spans,
            pieces,
        )
        return y


def bits_of(weight: GroupedWeight) -> int | None:
    """The bits of a code for these products: 4 where the codes of each group lie within 16 numbers that follow each
    other, else 8. None where they cannot be used: groups are not made of groups of 32 inputs."""
    if weight.group % GROUP:
        return None
    grouped = weight.codes.view(len(weight.codes), -1, weight.group)
    most = int((grouped.amax(-1).to(torch.int16) - grouped.amin(-1)).max())
    return 4 if most <= _MOST_CODE else 8


def pack_integers(
    weight: GroupedWeight, dtype: torch.dtype, most_bits: int = 8, *, pool: HugePagePool | None = None
) -> PackedIntegers | None:
    """The weight in blocks, in memory of the `pool`, if one is given; None where its codes need more than `most_bits`,
    or these products cannot be used for it."""
    bits = bits_of(weight)
    if bits is None or bits > most_bits:
        return None
    codes, offsets = _unsigned(weight, bits)
    kind = torch.float16 if _in_float16(weight.scales) and _in_float16(offsets) else torch.float32
    return PackedIntegers(
        weight.shape,
        dtype,
        in_blocks(_steps(codes, bits), pool),
        in_blocks(weight.scales.to(kind), pool),
        None if offsets is None else in_blocks(offsets.to(kind), pool),
        weight.group,
        bits,
    )


def in_8_bits(weight: PackedIntegers) -> PackedIntegers:
    """The same numbers with codes of 8 bits."""
    if weight.bits == 8:
        return weight
    steps = torch.stack((weight.codes & _MOST_CODE, weight.codes >> 4), 2).flatten(1, 2)
    return replace(weight, codes=steps | 128, bits=8)


def _unsigned(weight: GroupedWeight, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes [N, K] uint8 of `bits` bits, and the offsets [N, G] that belong to them. Those of 8 bits are moved up by
    128, which their products take off again."""
    if bits == 8:
        return weight.codes.view(torch.uint8) ^ 128, weight.offsets
    least, offsets = _least_codes(weight), weight.offsets
    if least.any():
        offsets = weight.scales * least + (0.0 if offsets is None else offsets)
    return (weight.codes - least.repeat_interleave(weight.group, 1)).to(torch.uint8), offsets


def _least_codes(weight: GroupedWeight) -> torch.Tensor:
    """[N, G] int8: the code of each group that becomes 0 and goes into its offset. The same in all groups where that is
    possible: scales that float16 holds leave it offsets that it holds then."""
    least: torch.Tensor = weight.codes.view(len(weight.codes), -1, weight.group).amin(-1)
    for first in (0, -8):
        if first <= int(least.min()) and int(weight.codes.max()) <= first + _MOST_CODE:
            return torch.full_like(least, first)
    return least


def _in_float16(numbers: torch.Tensor | None) -> bool:
    return numbers is None or torch.equal(numbers.to(torch.float16).float(), numbers)


def _steps(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K] → [N, K/32 · bits, 4]"""
    steps = codes.view(len(codes), -1, STEP)
    return steps if bits == 8 else steps[:, ::2] | steps[:, 1::2] << 4


def _bits(bits_like):
    return 4 if bits_like == types.uint8 else 8


@intrinsic
def _tile_rows(typing, bits_like):
    """Rows of a tile, at most."""

    def lower(context, builder, signature, values):
        return nir.i64(products(nir.features(context), _bits(signature.args[0])).most_rows)

    return types.int64(bits_like), lower


@intrinsic
def _block_bytes(typing, inputs, bits_like):
    """Bytes of a block's codes."""

    def lower(context, builder, signature, values):
        each = 16 * block_parts(context) * _bits(signature.args[1]) // 8
        return builder.mul(values[0], nir.i64(each))

    return types.int64(types.int64, bits_like), lower


@intrinsic
def _tile(
    typing, rows, x, records, codes, scales, offsets, bias, y, y_stride, groups, shared, shifts, count, like,
    scale_like, bits_like,
):  # fmt: skip
    """y[r, :count] of one block, for r < rows ≤ _tile_rows: code of its own for each number of rows. `shared`: groups
    of x that share a scale of the weight; `shifts`: groups of x that have an offset, all or 0."""

    def lower(context, builder, signature, values):
        rows, *arguments, _, _, _ = values
        emit_tiles(context, builder, signature.args[-3:], rows, arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13, like, scale_like, bits_like), lower


def emit_tiles(context, builder, kinds, rows, arguments):
    """Code of a tile for each number of rows. `kinds`: the types that stand for y's dtype, for that of scales, and for
    the bits of a code."""
    most = products(nir.features(context), _bits(kinds[2])).most_rows
    for_each_count(
        builder, rows, 1, most, lambda number: _emit_tile(context, builder, kinds, number, *arguments)
    )


def _emit_tile(
    context, builder, kinds, rows, x, records, codes, scales, offsets, bias, y, y_stride, groups, shared, shifts,
    count,
):  # fmt: skip
    element, scale_element = (nir.elements(context, kind) for kind in kinds[:2])
    bits = _bits(kinds[2])
    parts, summed = block_parts(context), products(nir.features(context), bits)
    inputs = builder.mul(groups, nir.i64(GROUP))
    sources = [builder.add(x, builder.mul(inputs, nir.i64(r))) for r in range(rows)]
    record_stride = builder.mul(groups, nir.i64(4 * RECORD))
    its_records = [builder.add(records, builder.mul(record_stride, nir.i64(r))) for r in range(rows)]
    step_bytes = PART_BYTES * parts
    group_bytes = step_bytes * bits
    next_block = builder.mul(groups, nir.i64(group_bytes))

    def record(index, r, word, kind=nir.F32):
        at = builder.add(its_records[r], builder.mul(index, nir.i64(4 * RECORD)))
        return nir.splat(builder, nir.load(builder, builder.add(at, nir.i64(4 * word)), kind, 4))

    def columns(place):
        return [
            scale_element.load(builder, builder.add(place, nir.i64(16 * scale_element.size * part)))
            for part in range(parts)
        ]

    def following(place, passed):
        """Where the next group's scales lie: after `shared` groups of x at the next place."""
        more = builder.add(passed, nir.i64(1))
        is_next = builder.icmp_signed("==", more, shared)
        there = builder.add(place, nir.i64(16 * scale_element.size * parts))
        return builder.select(is_next, there, place), builder.select(is_next, nir.i64(0), more)

    def shift(index, values):
        place, passed, *totals = values
        column = columns(place)
        return [
            *following(place, passed),
            *(
                nir.fma(builder, record(index, r, 1), column[part], totals[parts * r + part])
                for r in range(rows)
                for part in range(parts)
            ),
        ]

    def add_group(index, values):
        place, passed, *totals = values
        at = builder.add(codes, builder.mul(index, nir.i64(group_bytes)))
        given = [builder.add(source, builder.mul(index, nir.i64(GROUP))) for source in sources]
        column, made = columns(place), list(totals)
        for start in range(0, group_bytes, 64):
            nir.prefetch(builder, builder.add(at, builder.add(next_block, nir.i64(start))))
        for part in range(parts):
            place_of_part = builder.add(at, nir.i64(PART_BYTES * part))
            sums = summed.group(builder, given, place_of_part, nir.i64(step_bytes))
            if bits == 8:
                sums = [builder.add(whole, record(index, r, 2, nir.I32)) for r, whole in enumerate(sums)]
            for r, whole in enumerate(sums):
                scale = builder.fmul(column[part], record(index, r, 0))
                number = parts * r + part
                made[number] = nir.fma(builder, scale, builder.sitofp(whole, nir.V_F32), totals[number])
        return [*following(place, passed), *made]

    zeros = [nir.vector(nir.V_F32, 0.0)] * (parts * rows)
    _, _, *totals = nir.loop(builder, shifts, 1, [offsets, nir.i64(0), *zeros], shift)
    _, _, *totals = nir.loop(builder, groups, 1, [scales, nir.i64(0), *totals], add_group)
    store_tile(builder, element, totals, parts, bias, codes, y, y_stride, count)


def _multiply_units(team, arguments, like, scale_like, bits_like):
    x, records, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    codes, scales = read_int64(arguments + 24), read_int64(arguments + 32)
    offsets, bias = read_int64(arguments + 40), read_int64(arguments + 48)
    y, inputs, columns = read_int64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    shared, grain = read_int64(arguments + 80), read_int64(arguments + 88)
    spans, pieces = read_int64(arguments + 96), read_int64(arguments + 104)
    if pieces != 0:
        spans = read_int64(pieces)
    width, size, most = block_width(), size_of(like), _tile_rows(bits_like)
    block_bytes = _block_bytes(inputs, bits_like)
    groups = inputs // _GROUP
    shifts = groups if offsets != 0 else 0
    scale_bytes = groups // shared * width * size_of(scale_like)
    blocks = (columns + width - 1) // width
    grains = (blocks + grain - 1) // grain
    while True:
        unit = take_unit(team, grains * spans)
        if unit >= grains * spans:
            break
        expert, low, high = rows_of_piece(unit // grains, rows, spans, pieces)
        own, own_scales = part_of(codes, expert, pieces), part_of(scales, expert, pieces)
        own_offsets = part_of(offsets, expert, pieces)
        tiles = (high - low + most - 1) // most
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            source = own + block * block_bytes
            its_scales, its_offsets = own_scales + block * scale_bytes, own_offsets + block * scale_bytes
            its_bias = bias + (expert * columns + block * width) * size if bias != 0 else 0
            target, count = y + block * width * size, min(width, columns - block * width)
            for tile in range(tiles):
                # Tiles of equal size: a last one of a single row would take as long as one of four.
                row = low + (high - low) * tile // tiles
                end = low + (high - low) * (tile + 1) // tiles
                place, its_records = x + row * inputs, records + row * groups * _RECORD_BYTES
                out = target + row * columns * size
                _tile(
                    end - row, place, its_records, source, its_scales, its_offsets, its_bias, out,
                    columns * size, groups, shared, shifts, count, like, scale_like,
                    bits_like,
                )  # fmt: skip


_multiply = Kernel(_multiply_units, "q" * 14)
