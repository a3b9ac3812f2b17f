"""Base linears over weights in groups (`groups.GroupedWeight`) on a CPU, compiled by numba.

A weight is kept in blocks of outputs, as `numba_dense` keeps it, with a byte for each weight. A unit of work is a few
of these blocks and some hundred rows. A thread widens a block's codes in memory of its own, which its core's cache
holds, and multiplies all rows of the unit with it: in bfloat16 as pairs of bfloat16 where the processor multiplies
these, else in float32. Both hold codes exactly. For each group the products are summed in the order of the inputs, and
the group's scale comes to their sum:

    y[r, n] = Σ_g offsets[n, g] · X[r, g]  +  Σ_g scales[n, g] · (Σ_{k in g} codes[n, k] · x[r, k])  +  bias[n]

with X[r, g] = Σ_{k in g} x[r, k]. All sums are float32, and y is rounded once. So a row's result is bit-identical for
any other rows and any threads, for one row as for many."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.layers.numba_widen import to_float32
from loraplex.kernels.linear.numba_blocks import (
    BlockedLinear,
    block_parts,
    block_size,
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
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    horizontal_sum,
    host_features,
    jit,
    load_some,
    read_int64,
    size_of,
    splat,
    write_float32,
)

_V_I8 = ir.VectorType(nir.I8, nir.LANES)


@dataclass(frozen=True, slots=True)
class PackedGroups(BlockedLinear):
    """`codes` [⌈N/B⌉, K, B] int8, `scales` and `offsets` [⌈N/B⌉, G, B] float32 of B outputs each; zeros behind the N
    outputs."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        return (self.codes, self.scales, self.offsets)

    def multiply(self, x: torch.Tensor, bias: int, places: Sequence[int], pieces: int = 0) -> torch.Tensor:
        dtype, group, (columns, inputs) = self.dtype, self.group, self.shape
        rows, threads, groups = x.shape[0], num_threads(), inputs // group
        y = torch.empty(rows, columns, dtype=dtype)
        size, blocks = x.element_size(), len(self.codes)
        spans, grain = (0, 1) if pieces else unit_spans(rows * size, rows, blocks, threads)
        is_wide = rows > _TILE_ROWS_WIDE and _multiplies_pairs(dtype)
        if rows > _TILE_ROWS_HALVES and not _multiplies_pairs(dtype):
            x = to_float32(x)  # else each tile does it again
        given = (x.data_ptr(), x.stride(0) * x.element_size(), rows)
        sums_of_groups = torch.empty(0 if self.offsets is None else rows, groups, dtype=torch.float32)
        if self.offsets is not None:
            _sum_groups.run((LIKE[x.dtype],), *given, group, groups, sums_of_groups.data_ptr())
        # For a block's codes as bfloat16, for each thread.
        wide = torch.empty(threads if is_wide else 0, inputs * block_size(), dtype=torch.bfloat16)
        _multiply.run(
            (LIKE[x.dtype], LIKE[dtype]),
            *given,
            *places,
            sums_of_groups.data_ptr(),
            bias,
            y.data_ptr(),
            inputs,
            columns,
            group,
            grain,
            spans,
            wide.data_ptr() if is_wide else 0,
            pieces,
        )
        return y


def pack_groups(
    weight: GroupedWeight, dtype: torch.dtype, *, pool: HugePagePool | None = None
) -> PackedGroups:
    """The weight in blocks, in memory of the `pool`, if one is given. Raises ValueError where groups have an odd number
    of inputs."""
    if weight.group % 2:
        raise ValueError(f"a group has {weight.group} inputs, an odd number")
    codes, scales = in_blocks(weight.codes, pool), in_blocks(weight.scales, pool)
    offsets = None if weight.offsets is None else in_blocks(weight.offsets, pool)
    return PackedGroups(weight.shape, dtype, codes, scales, offsets, weight.group)


def _multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether codes are multiplied as pairs of bfloat16 on this processor."""
    return dtype is torch.bfloat16 and {"avx512f", "avx512bf16"} <= host_features()


def _in_pairs(context, like) -> bool:
    """`_multiplies_pairs`, of the processor that code is made for."""
    return like == types.uint16 and nir.has_dpbf16(context)


_TILE_ROWS_WIDE = 12
"""Rows of a tile where there are 32 wide registers."""
_TILE_ROWS = 6
_TILE_ROWS_HALVES = 4
"""The same of AVX2, of x in float32 and in 16 bits. More, and sums of a group would leave the registers."""


@intrinsic
def _tile_rows(typing, like):
    """Rows of a tile, at most."""

    def lower(context, builder, signature, values):
        return nir.i64(_rows_of_tile(context, signature.args[0]))

    return types.int64(like), lower


def _rows_of_tile(context, like):
    if nir.wide_registers(context):
        return _TILE_ROWS_WIDE
    return _TILE_ROWS if like == types.float32 else _TILE_ROWS_HALVES


@intrinsic
def _widen(typing, codes, wide, inputs):
    """Write a block's codes [inputs, 32] as pairs of bfloat16 [inputs/2, 32, 2]."""

    def lower(context, builder, signature, values):
        codes, wide, inputs = values

        def turn(index, _):
            source = builder.add(codes, builder.mul(index, nir.i64(64)))
            target = builder.add(wide, builder.mul(index, nir.i64(128)))
            for part in (0, 1):
                pair = _bfloat16_pair(
                    builder, *_widened(builder, builder.add(source, nir.i64(16 * part)), 32)
                )
                nir.store(builder, pair, builder.add(target, nir.i64(64 * part)), 64)
            return []

        nir.loop(builder, builder.lshr(inputs, nir.i64(1)), 1, [], turn)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), lower


@intrinsic(prefer_literal=True)
def _tile(
    typing, is_wide, rows, x, x_stride, codes, scales, offsets, sums, bias, y, y_stride, group, groups, shifts, count,
    ahead, x_like, like,
):  # fmt: skip
    """y[r, :count] of one block, for r < rows ≤ _most_rows: code of its own for each number of rows. `sums` are of x's
    groups, row by row; `shifts` is the number of groups with an offset: all or 0. What lies `ahead` is read next."""

    if not isinstance(is_wide, types.IntegerLiteral):
        return None
    wide = bool(is_wide.literal_value)

    def lower(context, builder, signature, values):
        _, rows, *arguments, _, _ = values
        kinds = signature.args[-2:]
        most = _rows_of_tile(context, kinds[0])
        # Of several tiles of equal size, none has less than half of the most rows.
        least = most // 2 if wide else 1
        for_each_count(
            builder,
            rows,
            least,
            most,
            lambda number: _emit_tile(context, builder, kinds, wide, number, *arguments),
        )
        return context.get_dummy_value()

    return types.void(is_wide, *[types.int64] * 15, x_like, like), lower


def _emit_tile(
    context, builder, kinds, is_wide, rows, x, x_stride, codes, scales, offsets, sums, bias, y, y_stride, group, groups,
    shifts, count, ahead,
):  # fmt: skip
    x_kind, kind = kinds
    element = nir.elements(context, kind)
    parts = block_parts(context)
    zeros = [nir.vector(nir.V_F32, 0.0)] * (parts * rows)

    def loads(address, stride):
        return [
            nir.load(builder, builder.add(address, nir.i64(stride * part)), nir.V_F32, 4)
            for part in range(parts)
        ]

    def shift(index, totals):
        column = loads(builder.add(offsets, builder.mul(index, nir.i64(64 * parts))), 64)
        following = []
        for r in range(rows):
            place = builder.add(builder.mul(groups, nir.i64(4 * r)), builder.mul(index, nir.i64(4)))
            given = nir.splat(builder, nir.load(builder, builder.add(sums, place), nir.F32, 4))
            own = totals[parts * r : parts * (r + 1)]
            following += [
                nir.fma(builder, given, part, total) for total, part in zip(own, column, strict=True)
            ]
        return following

    totals = nir.loop(builder, shifts, 1, zeros, shift)
    sources = [builder.add(x, builder.mul(x_stride, nir.i64(r))) for r in range(rows)]
    turns = builder.lshr(group, nir.i64(1))

    def add_group(index, totals):
        first = builder.mul(index, turns)
        turn = _turn(context, builder, x_kind, is_wide, sources, codes, first, ahead)
        partial = nir.loop(builder, turns, 1, zeros, turn)
        column = loads(builder.add(scales, builder.mul(index, nir.i64(64 * parts))), 64)
        return [
            nir.fma(builder, column[number % parts], own, total)
            for number, (own, total) in enumerate(zip(partial, totals, strict=True))
        ]

    totals = nir.loop(builder, groups, 1, totals, add_group)
    store_tile(builder, element, totals, parts, bias, codes, y, y_stride, count)


def _widened(builder, place, width):
    """The codes of two inputs for sixteen outputs, `width` bytes apart, as two vectors of float32."""
    small = [nir.load(builder, builder.add(place, nir.i64(start)), _V_I8, 1) for start in (0, width)]
    return [builder.sitofp(builder.sext(codes, nir.V_I32), nir.V_F32) for codes in small]


def _bfloat16_pair(builder, first, second):
    """Two vectors of codes as a pair of `nir.Elements`. A small whole number ends in zeros: its upper half is its
    bfloat16."""
    low = builder.lshr(builder.bitcast(first, nir.V_I32), nir.vector(nir.V_I32, 16))
    return builder.or_(low, builder.bitcast(second, nir.V_I32))


def _turn(context, builder, kind, is_wide, sources, codes, first, ahead):
    """The body of a loop over pairs of inputs, from pair number `first` on: the rows' products with two codes of each
    output. `kind` is x's."""
    parts = block_parts(context)
    element = nir.elements(context, kind)
    emit = _add_pairs if _in_pairs(context, kind) else _add_inputs

    def turn(index, totals):
        number = builder.add(first, index)
        place = builder.add(codes, builder.mul(number, nir.i64((64 if is_wide else 32) * parts)))
        nir.prefetch(builder, builder.add(ahead, builder.mul(number, nir.i64(32 * parts))))
        offset = builder.mul(number, nir.i64(2 * element.size))
        given = [builder.add(source, offset) for source in sources]
        return emit(builder, element, is_wide, given, place, parts, totals)

    return turn


def _add_pairs(builder, element, is_wide, given, place, parts, totals):
    """totals + the pairs that are `given` times those of one place, with the processor's products of pairs."""
    columns = [
        element.load_pair(builder, builder.add(place, nir.i64(64 * part)), None)
        if is_wide
        else _bfloat16_pair(builder, *_widened(builder, builder.add(place, nir.i64(16 * part)), 16 * parts))
        for part in range(parts)
    ]
    following = []
    for r, at in enumerate(given):
        pair = element.splat_pair(builder, at)
        own = totals[parts * r : parts * (r + 1)]
        following += [
            element.dot_pair(builder, total, pair, column) for total, column in zip(own, columns, strict=True)
        ]
    return following


def _add_inputs(builder, element, is_wide, given, place, parts, totals):
    """The same in float32, the first inputs of all rows before the second: few columns are in registers then."""
    both = [_widened(builder, builder.add(place, nir.i64(16 * part)), 16 * parts) for part in range(parts)]
    pairs = [element.splat_pair(builder, at) for at in given]
    if element.size == 2:
        pairs = [element.unpack(builder, pair) for pair in pairs]
    for number in (0, 1):
        totals = [
            nir.fma(builder, pair[number], both[part][number], totals[parts * r + part])
            for r, pair in enumerate(pairs)
            for part in range(parts)
        ]
    return totals


def _multiply_units(team, arguments, x_like, like):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    codes, scales, offsets = (
        read_int64(arguments + 24),
        read_int64(arguments + 32),
        read_int64(arguments + 40),
    )
    sums, bias, y = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    inputs, columns, group = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
    )
    grain, spans = read_int64(arguments + 96), read_int64(arguments + 104)
    width, size = block_width(), size_of(like)
    space, most, pieces = read_int64(arguments + 112), _tile_rows(x_like), read_int64(arguments + 120)
    wide = space + read_int64(team + 8) * inputs * width * 2
    if pieces != 0:
        spans = read_int64(pieces)
    groups = inputs // group
    shifts = groups if offsets != 0 else 0
    blocks = (columns + width - 1) // width
    grains = (blocks + grain - 1) // grain
    while True:
        unit = take_unit(team, grains * spans)
        if unit >= grains * spans:
            break
        expert, low, high = rows_of_piece(unit // grains, rows, spans, pieces)
        is_wide = space != 0 and high - low > most
        own, own_scales = part_of(codes, expert, pieces), part_of(scales, expert, pieces)
        own_offsets = part_of(offsets, expert, pieces)
        tiles = (high - low + most - 1) // most
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            source = own + block * inputs * width
            its_scales, its_offsets = (
                own_scales + block * groups * width * 4,
                own_offsets + block * groups * width * 4,
            )
            its_bias = bias + (expert * columns + block * width) * size if bias != 0 else 0
            target, count = y + block * width * size, min(width, columns - block * width)
            if is_wide:
                _widen(source, wide, inputs)
            for tile in range(tiles):
                # Tiles of equal size: a last one of a single row would take as long as one of four.
                row = low + (high - low) * tile // tiles
                end = low + (high - low) * (tile + 1) // tiles
                place, out, its_sums = (
                    x + row * x_stride,
                    target + row * columns * size,
                    sums + row * groups * 4,
                )
                if is_wide:
                    _tile(
                        1, end - row, place, x_stride, wide, its_scales, its_offsets, its_sums, its_bias, out,
                        columns * size, group, groups, shifts, count, source + inputs * width, x_like, like,
                    )  # fmt: skip
                else:
                    _tile(
                        0, end - row, place, x_stride, source, its_scales, its_offsets, its_sums, its_bias, out,
                        columns * size, group, groups, shifts, count, source + inputs * width, x_like, like,
                    )  # fmt: skip


_multiply = Kernel(_multiply_units, "q" * 16)


@jit
def _sum_of(x, count, like):
    total = splat(0.0)
    for i in range(0, count, 16):
        total = total + load_some(x + i * size_of(like), count - i, like)
    return horizontal_sum(total)


def _sum_units(team, arguments, like):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    group, groups, out = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    while True:
        row = take_unit(team, rows)
        if row >= rows:
            break
        for number in range(groups):
            place = x + row * x_stride + number * group * size_of(like)
            write_float32(_sum_of(place, group, like), out + (row * groups + number) * 4)


_sum_groups = Kernel(_sum_units, "qqqqqq")
"""X [rows, groups] float32: sums of each group of x."""
