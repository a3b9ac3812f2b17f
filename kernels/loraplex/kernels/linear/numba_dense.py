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

from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.host_memory import HugePagePool
from loraplex.kernels.linear import dense
from loraplex.kernels.linear.numba_dense_tiles import INPUTS, run_products
from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, num_threads, take_unit
from loraplex.kernels.numba_runtime.vectors import LIKE, host_features, read_int64, size_of

_UNIT_BYTES = 768
"""Bytes of a column of x that one reading of a block's weights serves, at most: more rows would not stay in a core's
own cache beside it."""

_OWN_ROWS = 48
"""Rows for each thread from which on a thread computes rows of its own, and reads all weights for them. What other
kernels leave of these rows is in its core's cache."""

_ROWS_TO_PREFETCH = 6
"""Rows of a tile from which on the next block is asked for ahead: computing takes longer than reading then, and in all
but a block's first tile memory would be idle. With fewer rows it costs up to a tenth."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`blocks` [⌈N/B⌉, K/2, B, 2] in 16 bits, [⌈N/B⌉, K, B] in float32, of B outputs each; zeros behind the N
    outputs."""

    blocks: torch.Tensor
    shape: tuple[int, int]


def block_size() -> int:
    """B: outputs whose sums a tile of rows holds in registers."""
    return 32 if "avx512f" in host_features() else 16


def pack_weight(
    weight: torch.Tensor, *, batch_invariant: bool = False, pool: HugePagePool | None = None
) -> PackedWeight | torch.Tensor:
    """The weight [N, K] of a linear, as `linear` reads it fastest: in blocks where these products are used for the
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
    return PackedWeight(blocks, (out_features, in_features))


def in_blocks(columns: torch.Tensor, pool: HugePagePool | None) -> torch.Tensor:
    """[N, C, …] → [⌈N/B⌉, C, B, …], zeros behind the N outputs, in memory of the `pool`, if one is given."""
    rows, count, *rest = columns.shape
    width = block_size()
    sizes = (-(-rows // width), count, width, *rest)
    blocks = torch.zeros(sizes, dtype=columns.dtype) if pool is None else pool.zeros(sizes, columns.dtype)
    for block, part in enumerate(columns.split(width)):
        blocks[block, :, : len(part)] = part.transpose(0, 1)
    return blocks


def linear(
    x: torch.Tensor, weight: PackedWeight | torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], the weight [N, K] as `pack_weight` made it, bias [N] or None → [T, N], contiguous, all of one dtype.
    Sums are float32, rounded once, behind the bias. Raises ValueError for other shapes."""
    if isinstance(weight, torch.Tensor):
        return dense.linear(x, weight, bias)
    out_features, in_features = weight.shape
    dtype = weight.blocks.dtype
    if (
        x.dtype is not dtype
        or x.dim() != 2
        or x.shape[1] != in_features
        or (
            bias is not None
            and (bias.dtype is not dtype or bias.shape != (out_features,) or not bias.is_contiguous())
        )
    ):
        raise ValueError(f"x {list(x.shape)} {x.dtype} does not fit a weight {list(weight.shape)} in {dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape[0], x.element_size()
    y = torch.empty(rows, out_features, dtype=dtype)
    blocks = len(weight.blocks)
    threads = num_threads()
    spans, grain = unit_spans(rows * size, rows, blocks, threads)
    given = (x.data_ptr(), x.stride(0) * size)
    places = (weight.blocks.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    if dtype is torch.bfloat16 and in_features % INPUTS == 0 and amx.is_permitted():
        grain = _grain(blocks, threads)
        run_products(given, rows, *places, in_features, out_features, grain)
    else:
        _multiply.run((LIKE[dtype],), *given, rows, *places, in_features, out_features, grain, spans)
    return y


def unit_spans(column_bytes: int, rows: int, blocks: int, threads: int) -> tuple[int, int]:
    """How many spans of rows, and how many of `blocks` blocks in a unit, a product of `rows` rows is divided into.
    `column_bytes`: of a column of x."""
    spans = -(-column_bytes // _UNIT_BYTES)
    if rows >= threads * _OWN_ROWS:
        return -(-spans // threads) * threads, 1
    return spans, _grain(blocks, threads)


def _grain(blocks: int, threads: int) -> int:
    # A few blocks at once where a block is soon done: taking one costs as much as some rows of it.
    return max(1, blocks // (threads * 8))


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
def _block_size(typing):
    """`block_size`, of the processor that code is made for."""

    def lower(context, builder, signature, values):
        return nir.i64(32 if nir.wide_registers(context) else 16)

    return types.int64(), lower


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
        done = builder.append_basic_block("done")
        cases = [builder.append_basic_block(f"rows{number}") for number in range(1, most + 1)]
        choice = builder.switch(rows, cases[-1])
        for number, block in enumerate(cases, 1):
            if number < most:
                choice.add_case(nir.i64(number), block)
            builder.position_at_end(block)
            _emit_tile(context, builder, kind, number, *arguments)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, like), lower


def _emit_tile(context, builder, kind, rows, x, x_stride, weight, bias, y, y_stride, inputs, count):
    element = nir.elements(context, kind)
    parts = 2 if nir.wide_registers(context) else 1
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
    for part in range(parts):
        mask = nir.lane_mask(builder, nir.i64(0), builder.sub(count, nir.i64(16 * part)))
        start = nir.i64(16 * element.size * part)
        has_bias = builder.icmp_signed("!=", bias, nir.i64(0))
        lanes = builder.select(has_bias, mask, ir.Constant(nir.V_I1, [0] * nir.LANES))
        # Without a bias no lane is on. The address has memory then too: without any the load would take hundreds of
        # cycles.
        place = builder.add(builder.select(has_bias, bias, weight), start)
        shift = element.load(builder, place, lanes)
        for r in range(rows):
            target = builder.add(builder.add(y, builder.mul(y_stride, nir.i64(r))), start)
            element.store(builder, builder.fadd(sums[parts * r + part], shift), target, mask)


def _multiply_units(team, arguments, like):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    weight, bias, y = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    inputs, columns, grain = (
        read_int64(arguments + 48),
        read_int64(arguments + 56),
        read_int64(arguments + 64),
    )
    spans = read_int64(arguments + 72)
    width, size, most = _block_size(), size_of(like), _tile_rows(like)
    blocks = (columns + width - 1) // width
    grains = (blocks + grain - 1) // grain
    while True:
        unit = take_unit(team, grains * spans)
        if unit >= grains * spans:
            break
        span = unit // grains
        low, high = rows * span // spans, rows * (span + 1) // spans
        tiles = (high - low + most - 1) // most
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            source = weight + block * inputs * width * size
            begin = bias + block * width * size if bias != 0 else 0
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


_multiply = Kernel(_multiply_units, "qqqqqqqqqq")
