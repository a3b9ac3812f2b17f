"""Base linears on a CPU, compiled by numba: y = x·Wᵀ + b for one row as for many.

A weight is kept in blocks of outputs: for each input, or in 16 bits for each pair of inputs, the elements of the
outputs side by side, as products of vectors take them (`numba_runtime.ir.Elements.dot_pair`). A unit of work is a few
of these blocks and some hundred rows; threads take the next unit when they finish one. Every sum goes over the inputs
in their order, so a row's result is bit-identical for any other rows and any threads. No library's product of matrices
promises that: what it chooses for one row is not what it chooses for many.

In bfloat16 AMX's tiles multiply the same blocks (`numba_dense_tiles`), where the processor has them, Linux permits them
and the number of inputs is a multiple of 32. That is decided by the weight, never by the rows.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.linear import dense
from loraplex.kernels.linear.numba_blocks import (
    BlockedLinear,
    block_parts,
    block_size,
    block_width,
    for_each_count,
    part_of,
    rows_of_piece,
    store_tile,
    unit_blocks,
    unit_spans,
)
from loraplex.kernels.linear.numba_dense_tiles import INPUTS, run_products
from loraplex.kernels.linear.packed import PackedLinear
from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, num_threads, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, host_features, read_int64, size_of

_ROWS_TO_PREFETCH = 6
"""Rows of a tile from which on the next block is asked for ahead: computing takes longer than reading then, and in all
but a block's first tile memory would be idle. With fewer rows it costs up to a tenth."""


def pack_weight(
    weight: torch.Tensor, *, batch_invariant: bool = False, pool: HugePagePool | None = None
) -> PackedLinear:
    """The weight [N, K] of a linear, as it is read fastest: in blocks where these products are used for the
    dtype and the processor (`is_for`), else what `dense.pack_weight` makes of it. The blocks' memory is the `pool`'s,
    if one is given."""
    out_features, in_features = weight.shape
    in_pairs = weight.itemsize == 2
    if not is_for(weight.dtype, batch_invariant=batch_invariant) or (in_pairs and in_features % 2):
        return dense.pack_weight(weight)
    width = block_size()
    num_blocks = -(-out_features // width)
    sizes = (num_blocks, in_features * width)
    blocks = torch.zeros(sizes, dtype=weight.dtype) if pool is None else pool.zeros(sizes, weight.dtype)
    # A pair of inputs is copied as one number of 32 bits, a block at a time, which a core's cache holds.
    units, columns = weight.contiguous().view(torch.int32), blocks.view(torch.int32)
    for block, rows in enumerate(units.split(width)):
        columns[block].view(-1, width)[:, : len(rows)] = rows.T
    return PackedWeight((out_features, in_features), weight.dtype, blocks)


@dataclass(frozen=True, slots=True)
class PackedWeight(BlockedLinear):
    """`blocks` [⌈N/B⌉, K/2, B, 2] in 16 bits, [⌈N/B⌉, K, B] in float32, of B outputs each; zeros behind the N
    outputs."""

    blocks: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.blocks,)

    def multiply(self, x: torch.Tensor, bias: int, places: Sequence[int], pieces: int = 0) -> torch.Tensor:
        columns, inputs = self.shape
        rows, size, threads, count = x.shape[0], x.element_size(), num_threads(), len(self.blocks)
        y = torch.empty(rows, columns, dtype=x.dtype)
        given = (x.data_ptr(), x.stride(0) * size, rows, places[0], bias, y.data_ptr(), inputs, columns)
        if x.dtype is torch.bfloat16 and inputs % INPUTS == 0 and not pieces and amx.is_permitted():
            run_products(*given, unit_blocks(count, threads))
        else:
            spans, grain = (0, 1) if pieces else unit_spans(rows * size, rows, count, threads)
            _multiply.run((LIKE[x.dtype],), *given, grain, spans, pieces)
        return y


def is_for(dtype: torch.dtype, *, batch_invariant: bool = False) -> bool:
    """Whether these products are used for a dtype on this processor: any with AVX2, but in float16 on one with AMX just
    where a row's bits must not depend on other rows (`batch_invariant`): oneDNN is faster there."""
    features = host_features()
    is_fastest = dtype is not torch.float16 or "amx-bf16" not in features
    return dtype in LIKE and "avx2" in features and (is_fastest or batch_invariant)


def _most_rows(context, like):
    """Rows of a tile: their sums, a block's weights and one element of x fill the registers."""
    if nir.wide_registers(context):
        return 12
    return 6 if like == types.float32 else 4


@intrinsic
def _tile_rows(typing, like):
    def lower(context, builder, signature, values):
        return nir.i64(_most_rows(context, signature.args[0]))

    return types.int64(like), lower


@intrinsic
def _tile(typing, rows, x, x_stride, weight, bias, y, y_stride, inputs, count, like):
    """y[r, :count] = x[r]·Wᵀ + bias of one block, for r < rows ≤ _most_rows, with all sums in registers: code of its
    own for each number of rows."""

    def lower(context, builder, signature, values):
        rows, *arguments, _ = values
        kind = signature.args[-1]
        most = _most_rows(context, kind)
        for_each_count(
            builder, rows, 1, most, lambda number: _emit_tile(context, builder, kind, number, *arguments)
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, like), lower


def _emit_tile(context, builder, kind, rows, x, x_stride, weight, bias, y, y_stride, inputs, count):
    element = nir.elements(context, kind)
    parts = block_parts(context)
    in_pairs = element.size == 2
    # Of one input, or of a pair in 16 bits, 4 bytes are of one output.
    turns = builder.lshr(inputs, nir.i64(1)) if in_pairs else inputs
    next_block = builder.mul(turns, nir.i64(64 * parts))
    sources = [builder.add(x, builder.mul(x_stride, nir.i64(r))) for r in range(rows)]

    def turn(index, sums):
        place = builder.add(weight, builder.mul(index, nir.i64(64 * parts)))
        offset = builder.mul(index, nir.i64(4))
        if rows >= _ROWS_TO_PREFETCH:
            ahead = builder.add(place, next_block)
            for part in range(parts):
                nir.prefetch(builder, builder.add(ahead, nir.i64(64 * part)))
        places = [builder.add(place, nir.i64(64 * part)) for part in range(parts)]
        following = []
        if in_pairs:
            columns = [element.load_pair(builder, at, None) for at in places]
        else:
            columns = [element.load(builder, at) for at in places]
        for r in range(rows):
            own, at = sums[parts * r : parts * (r + 1)], builder.add(sources[r], offset)
            if in_pairs:
                given = element.splat_pair(builder, at)
                following += [
                    element.dot_pair(builder, total, given, column)
                    for total, column in zip(own, columns, strict=True)
                ]
            else:
                given = nir.splat(builder, nir.load(builder, at, nir.F32, 4))
                following += [
                    nir.fma(builder, given, column, total) for total, column in zip(own, columns, strict=True)
                ]
        return following

    sums = nir.loop(builder, turns, 1, [nir.vector(nir.V_F32, 0.0)] * (parts * rows), turn)
    store_tile(builder, element, sums, parts, bias, weight, y, y_stride, count)


def _multiply_units(team, arguments, like):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    weight, bias, y = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    inputs, columns, grain = (
        read_int64(arguments + 48),
        read_int64(arguments + 56),
        read_int64(arguments + 64),
    )
    spans, pieces = read_int64(arguments + 72), read_int64(arguments + 80)
    if pieces != 0:
        spans = read_int64(pieces)
    width, size, most = block_width(), size_of(like), _tile_rows(like)
    blocks = (columns + width - 1) // width
    grains = (blocks + grain - 1) // grain
    while True:
        unit = take_unit(team, grains * spans)
        if unit >= grains * spans:
            break
        expert, low, high = rows_of_piece(unit // grains, rows, spans, pieces)
        own = part_of(weight, expert, pieces)
        tiles = (high - low + most - 1) // most
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            source = own + block * inputs * width * size
            begin = bias + (expert * columns + block * width) * size if bias != 0 else 0
            target = y + block * width * size
            count = min(width, columns - block * width)
            for tile in range(tiles):
                # Tiles of equal size: a last one of a single row would take as long as one of four.
                row = low + (high - low) * tile // tiles
                end = low + (high - low) * (tile + 1) // tiles
                _tile(
                    end - row,
                    x + row * x_stride,
                    x_stride,
                    source,
                    begin,
                    target + row * columns * size,
                    columns * size,
                    inputs,
                    count,
                    like,
                )


_multiply = Kernel(_multiply_units, "q" * 11)
