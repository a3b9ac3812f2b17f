"""Base linears in bfloat16 with AMX's tiles: y = x·Wᵀ + b for one row as for many. They read `numba_dense`'s blocks.

A block's 32 outputs are computed for up to 32 rows at once. A sum goes over the inputs in their order, 32 at a time
(`numba_runtime.amx` says how those are summed). With another number of rows the tiles have other shapes, and a sum has
the same order, so a row's result has the same bits.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.amx import configure_tiles, release_tiles
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    jit,
    load,
    load_some,
    read_int64,
    splat,
    store,
    store_some,
)

TILE_ROWS = 2 * amx.ROWS
"""Rows of x that are multiplied at once."""
INPUTS = 2 * amx.PAIRS
"""Inputs that one product sums; a weight has a multiple of it."""
_WIDTH = 32
"""Outputs of a block."""
_PART_CHUNKS = 16
"""Products that follow each other for one tile of rows. Their 32 KiB of weights stay in a core's first cache for the
next tile of rows."""
_UNIT_TILES = 12
"""Tiles of rows that one reading of a block's weights serves, at most."""
_HALF = amx.ROWS  # numba takes no attribute of a module into what it caches
_F32, _BF16 = np.float32(0), np.uint16(0)


def run_products(
    x: int, x_stride: int, rows: int, blocks: int, bias: int, y: int, inputs: int, columns: int, grain: int
) -> None:
    """y [rows, columns] = x·Wᵀ + b, for addresses of bfloat16: of x, whose rows are `x_stride` bytes apart, of the
    blocks of the weight [columns, inputs], of the bias or 0, and of y. `grain`: blocks of a unit. Only where
    `amx.is_permitted`."""
    shapes = _shapes(min(rows, TILE_ROWS)).ctypes.data
    _multiply.run((), x, x_stride, rows, blocks, bias, y, inputs, columns, grain, shapes)


@cache
def _shapes(rows: int) -> NDArray[np.uint8]:
    """Shapes of the tiles of `rows` ≤ TILE_ROWS rows: sums of the first sixteen are T0 and T1, of the others T2 and T3;
    their inputs are T4 and T5; weights are T6 and T7."""
    first, second = min(rows, amx.ROWS), max(rows - amx.ROWS, 0)
    used = {0: first, 1: first, 4: first, 6: amx.PAIRS, 7: amx.PAIRS}
    return amx.tile_shapes(used | ({2: second, 3: second, 5: second} if second else {}))


@intrinsic(prefer_literal=True)
def _add_products(typing, halves, x, x_stride, weight, chunks, sums, begun):
    """sums[r] += x[r]·Wᵀ over `chunks` times INPUTS inputs of one block, in float32 [rows, 32]; from 0 where `begun` is
    0. `halves` (a constant): 2 where there are more than sixteen rows."""
    if not isinstance(halves, types.IntegerLiteral):
        return None
    count = halves.literal_value

    def lower(context, builder, signature, values):
        _, x, x_stride, weight, chunks, sums, begun = values
        inputs = [builder.add(x, builder.mul(x_stride, nir.i64(amx.ROWS * half))) for half in range(count)]
        row_bytes = nir.i64(4 * _WIDTH)
        totals = [
            (2 * half + part, builder.add(sums, nir.i64(amx.ROWS * half * 4 * _WIDTH + 64 * part)))
            for half in range(count)
            for part in (0, 1)
        ]
        with builder.if_else(builder.icmp_signed("!=", begun, nir.i64(0))) as (goes_on, begins):
            with goes_on:
                for tile, place in totals:
                    amx.load_tile(builder, tile, place, row_bytes)
            with begins:
                for tile, _ in totals:
                    amx.clear_tile(builder, tile)

        def add_chunk(index, _):
            offset = builder.mul(index, nir.i64(2 * INPUTS))
            place = builder.add(weight, builder.mul(offset, nir.i64(_WIDTH)))
            for part in (0, 1):
                amx.load_tile(builder, 6 + part, builder.add(place, nir.i64(64 * part)), row_bytes)
            for half, row in enumerate(inputs):
                amx.load_tile(builder, 4 + half, builder.add(row, offset), x_stride)
                for part in (0, 1):
                    amx.multiply_tiles(builder, 2 * half + part, 4 + half, 6 + part)
            return []

        nir.loop(builder, chunks, 1, [], add_chunk)
        for tile, place in totals:
            amx.store_tile(builder, tile, place, row_bytes)
        return context.get_dummy_value()

    return types.void(halves, *[types.int64] * 6), lower


@jit
def _finish(sums, rows, bias, y, y_stride, count):
    """y[r, :count] = sums[r] + bias, rounded once."""
    left = max(count - 16, 0)
    first = second = splat(_F32)
    if bias != 0:
        first, second = load_some(bias, count, _BF16), load_some(bias + 32, left, _BF16)
    for r in range(rows):
        source, target = sums + r * 4 * _WIDTH, y + r * y_stride
        low, high = load(source, _F32) + first, load(source + 64, _F32) + second
        if left == 16:
            store(low, target, _BF16)
            store(high, target + 32, _BF16)
        else:
            store_some(low, target, count, _BF16)
            store_some(high, target + 32, left, _BF16)


def _multiply_units(team, arguments):
    x, x_stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    weight, bias, y = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    inputs, columns = read_int64(arguments + 48), read_int64(arguments + 56)
    grain, shapes = read_int64(arguments + 64), read_int64(arguments + 72)
    blocks, chunks = (columns + _WIDTH - 1) // _WIDTH, inputs // INPUTS
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    spans = (tiles + _UNIT_TILES - 1) // _UNIT_TILES
    grains = (blocks + grain - 1) // grain
    tile_rows, tile_bytes = min(rows, TILE_ROWS), TILE_ROWS * _WIDTH * 4
    space = np.empty(min(tiles, _UNIT_TILES) * tile_bytes + 64, np.uint8)
    has_shapes = False
    while True:
        unit = take_unit(team, grains * spans)
        if unit >= grains * spans:
            break
        sums = (
            (space.ctypes.data + 63) // 64 * 64
        )  # in the loop: numba frees an array behind its last use by name
        if not has_shapes:
            configure_tiles(shapes)
            has_shapes = True
        span = unit // grains
        low, high = tiles * span // spans, tiles * (span + 1) // spans
        first = unit % grains * grain
        for block in range(first, min(first + grain, blocks)):
            for begun in range(0, chunks, _PART_CHUNKS):
                part = min(_PART_CHUNKS, chunks - begun)
                source = weight + (block * chunks + begun) * 2 * INPUTS * _WIDTH
                for tile in range(low, high):
                    # The last tile begins early, and computes some rows again, with the same bits.
                    row = min(tile * TILE_ROWS, rows - tile_rows)
                    given = x + row * x_stride + begun * 2 * INPUTS
                    place = sums + (tile - low) * tile_bytes
                    if tile_rows > _HALF:
                        _add_products(2, given, x_stride, source, part, place, begun)
                    else:
                        _add_products(1, given, x_stride, source, part, place, begun)
                    if begun + part == chunks:
                        _finish(
                            place,
                            tile_rows,
                            bias + block * _WIDTH * 2 if bias != 0 else 0,
                            y + (row * columns + block * _WIDTH) * 2,
                            columns * 2,
                            min(_WIDTH, columns - block * _WIDTH),
                        )
    if has_shapes:
        release_tiles()


_multiply = Kernel(_multiply_units, "q" * 10)
