"""Base linears on a CPU in bfloat16, compiled by numba: y = x·Wᵀ + b for one row as for many.

A weight is kept in blocks of BLOCK outputs: for each pair of inputs the two elements of each output side by side, as
the product of pairs of bfloat16 takes them (`numba_runtime.ir.Elements.dot_pair`). A unit of work is a few of these
blocks and up to MAX_UNIT_ROWS rows; threads take the next unit when they finish one. Every sum goes over the inputs in
their order, so a row's result is bit-identical for any other rows and any threads.

oneDNN's products of packed weights are as fast for a prompt's rows and take half as long again for a few
(docs/performance.md), which is most of what a server does.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.layers import dense
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, num_threads
from loraplex.kernels.numba_runtime.vectors import fetch_add, host_features, read_int64

BLOCK = 32
MAX_UNIT_ROWS = 384
"""Rows that one reading of a block's weights serves. More would not stay in a core's own cache beside it."""
_TILE_ROWS = 12
"""Most rows of a tile: with two vectors of sums each they fill the registers of AVX-512."""


_ROWS_TO_PREFETCH = 6
"""Rows of a tile from which on the next block is asked for ahead: computing takes longer than reading then, and in all
but a block's first tile memory would be idle. With fewer rows it costs up to a tenth."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """`blocks` [⌈N/32⌉, K/2, 2, 16, 2] bfloat16, zeros behind the N outputs."""

    blocks: torch.Tensor
    shape: tuple[int, int]


def pack_weight(weight: torch.Tensor) -> PackedWeight | torch.Tensor:
    """The weight [N, K] of a linear, as `linear` reads it fastest: in blocks where it is bfloat16, K is even and the
    processor is one that these products are made for, else what `dense.pack_weight` makes of it."""
    out_features, in_features = weight.shape
    if weight.dtype is not torch.bfloat16 or in_features % 2 or not is_for_this_processor():
        return dense.pack_weight(weight)
    num_blocks = -(-out_features // BLOCK)
    blocks = torch.zeros(num_blocks, in_features // 2, 2, 16, 2, dtype=torch.bfloat16)
    # A pair of inputs is copied as one number of 32 bits, a block at a time, which a core's cache holds.
    pairs, columns = (
        weight.contiguous().view(torch.int32),
        blocks.view(torch.int32).view(num_blocks, -1, BLOCK),
    )
    for block, rows in enumerate(pairs.split(BLOCK)):
        columns[block, :, : len(rows)] = rows.T
    return PackedWeight(blocks, (out_features, in_features))


def linear(
    x: torch.Tensor, weight: PackedWeight | torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K], the weight [N, K] as `pack_weight` made it, bias [N] or None → [T, N], contiguous, all of one dtype.
    Sums are float32, rounded once, behind the bias. Raises ValueError for other shapes."""
    if isinstance(weight, torch.Tensor):
        return dense.linear(x, weight, bias)
    out_features, in_features = weight.shape
    if (
        x.dtype is not torch.bfloat16
        or x.dim() != 2
        or x.shape[1] != in_features
        or (bias is not None and (bias.shape != (out_features,) or not bias.is_contiguous()))
    ):
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} does not fit a weight {list(weight.shape)} in bfloat16"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    y = torch.empty(rows, out_features, dtype=torch.bfloat16)
    blocks = -(-out_features // BLOCK)
    # A few blocks at once where a block is soon done: taking one costs as much as some rows of it.
    grain = max(1, blocks // (num_threads() * 8))
    _multiply.run(
        (),
        x.data_ptr(),
        x.stride(0) * 2,
        rows,
        weight.blocks.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        in_features // 2,
        out_features,
        grain,
    )
    return y


def is_for_this_processor() -> bool:
    """AVX512-BF16 without AMX, whose tiles only oneDNN uses."""
    features = host_features()
    return "avx512bf16" in features and "amx-bf16" not in features


@intrinsic
def _tile(typing, rows, x, x_stride, weight, bias, y, y_stride, pairs, count):
    """y[r, :count] = x[r]·Wᵀ + bias of one block, for r < rows ≤ _TILE_ROWS, with all sums in registers: code of its
    own for each number of rows."""

    def lower(context, builder, signature, values):
        rows, *arguments = values
        done = builder.append_basic_block("done")
        cases = [builder.append_basic_block(f"rows{number}") for number in range(1, _TILE_ROWS + 1)]
        choice = builder.switch(rows, cases[-1])
        for number, block in enumerate(cases, 1):
            if number < _TILE_ROWS:
                choice.add_case(nir.i64(number), block)
            builder.position_at_end(block)
            _emit_tile(context, builder, number, *arguments)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), lower


def _emit_tile(context, builder, rows, x, x_stride, weight, bias, y, y_stride, pairs, count):
    halves = nir.elements(context, types.uint16)
    next_block = builder.mul(pairs, nir.i64(BLOCK * 4))
    sources = [builder.add(x, builder.mul(x_stride, nir.i64(r))) for r in range(rows)]

    def turn(index, sums):
        place = builder.add(weight, builder.mul(index, nir.i64(128)))
        offset = builder.mul(index, nir.i64(4))
        if rows >= _ROWS_TO_PREFETCH:
            ahead = builder.add(place, next_block)
            for line in (0, 64):
                nir.prefetch(builder, builder.add(ahead, nir.i64(line)))
        columns = [halves.load_pair(builder, builder.add(place, nir.i64(64 * c)), None) for c in (0, 1)]
        following = []
        for r in range(rows):
            pair = halves.splat_pair(builder, builder.add(sources[r], offset))
            following += [halves.dot_pair(builder, sums[2 * r + c], pair, columns[c]) for c in (0, 1)]
        return following

    zero = ir.Constant(nir.V_F32, [0.0] * nir.LANES)
    sums = nir.loop(builder, pairs, 1, [zero] * (2 * rows), turn)
    for c in (0, 1):
        mask = nir.lane_mask(builder, nir.i64(0), builder.sub(count, nir.i64(16 * c)))
        start = nir.i64(32 * c)
        has_bias = builder.icmp_signed("!=", bias, nir.i64(0))
        # An address of 0 is never read: no lane is on.
        lanes = builder.select(has_bias, mask, ir.Constant(nir.V_I1, [0] * nir.LANES))
        shift = halves.load(builder, builder.add(bias, start), lanes)
        for r in range(rows):
            target = builder.add(builder.add(y, builder.mul(y_stride, nir.i64(r))), start)
            halves.store(builder, builder.fadd(sums[2 * r + c], shift), target, mask)


def _multiply_units(taken, arguments):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    weight, bias, y = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    pairs, columns, grain = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    blocks = (columns + BLOCK - 1) // BLOCK
    spans = (rows + MAX_UNIT_ROWS - 1) // MAX_UNIT_ROWS
    grains = (blocks + grain - 1) // grain
    while True:
        unit = fetch_add(taken, 1)
        if unit >= grains * spans:
            break
        span = unit // grains
        low, high = rows * span // spans, rows * (span + 1) // spans
        tiles = (high - low + _TILE_ROWS - 1) // _TILE_ROWS
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            source = weight + block * pairs * (BLOCK * 4)
            begin = bias + block * (BLOCK * 2) if bias != 0 else 0
            target = y + block * (BLOCK * 2)
            count = min(BLOCK, columns - block * BLOCK)
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
                    target + row * columns * 2,
                    columns * 2,
                    pairs,
                    count,
                )


_multiply = Kernel(_multiply_units, "qqqqqqqqq")
