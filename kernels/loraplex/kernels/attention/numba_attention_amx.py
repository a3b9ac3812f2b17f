"""The products of attention in bfloat16 with AMX's tiles, for as many query vectors as there are.

A score is summed 32 dimensions at a time, a value's sum a block of positions at a time, in their order, and
`numba_runtime.amx` says how the instruction sums those. Up to sixteen query vectors are multiplied at once. Tiles of
fewer rows have the same order of sums, so the bits do not depend on how many query vectors there are.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from loraplex.kernels.attention.numba_attention_products import BLOCK, SEGMENT
from loraplex.kernels.numba_runtime import amx
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.amx import configure_tiles
from loraplex.kernels.numba_runtime.vectors import jit, load, read_float32, splat, store

_DIMS = 2 * amx.PAIRS
"""Dimensions that one product of queries and keys sums; a head has a multiple of it."""
_SUMS = 4
"""Tiles of sums that one tile of queries or weights is multiplied into."""
_GIVEN, _WEIGHTS, _KEYS, _VALUES = 4, 5, 6, 7
_ROWS = amx.ROWS  # numba takes no attribute of a module into what it caches
_F32 = np.float32(0)


def tile_shapes(dtype: torch.dtype, dim: int) -> int:
    """The address of the shapes of tiles that `all_scores` and `all_values` take; 0 where there are no tiles for heads
    of `dim` dimensions in this dtype."""
    if dtype is not torch.bfloat16 or dim % _DIMS or not amx.is_permitted():
        return 0
    return int(_shapes().ctypes.data)


@cache
def _shapes() -> NDArray[np.uint8]:
    """[16, 64]: for 1 to 16 query vectors."""
    half = BLOCK // 2
    return np.stack(
        [
            amx.tile_shapes(
                {**dict.fromkeys((*range(_SUMS), _GIVEN, _WEIGHTS), rows), _KEYS: amx.PAIRS, _VALUES: half},
                narrow=frozenset({_WEIGHTS}),
            )
            for rows in range(1, amx.ROWS + 1)
        ]
    )


@intrinsic
def _scores(typing, q, dim, blocks, num_blocks, scores):
    """scores[m, 16·j + i] = q[m] · K_j[:, i], for the rows that the tiles have; four blocks at a time."""

    def lower(context, builder, signature, values):
        if not amx.has_tiles(context):
            return context.get_dummy_value()
        q, dim, blocks, num_blocks, scores = values
        q_row = builder.mul(dim, nir.i64(2))
        chunks = builder.udiv(dim, nir.i64(_DIMS))

        def some_blocks(j, _):
            first = builder.add(blocks, builder.mul(j, nir.i64(8)))
            keys = [nir.load(builder, builder.add(first, nir.i64(8 * b)), nir.I64, 8) for b in range(_SUMS)]
            for tile in range(_SUMS):
                amx.clear_tile(builder, tile)

            def add_chunk(chunk, _):
                given = builder.add(q, builder.mul(chunk, nir.i64(2 * _DIMS)))
                amx.load_tile(builder, _GIVEN, given, q_row)
                offset = builder.mul(chunk, nir.i64(2 * _DIMS * BLOCK))
                for tile, key in enumerate(keys):
                    amx.load_tile(builder, _KEYS, builder.add(key, offset), nir.i64(4 * BLOCK))
                    amx.multiply_tiles(builder, tile, _GIVEN, _KEYS)
                return []

            nir.loop(builder, chunks, 1, [], add_chunk)
            place = builder.add(scores, builder.mul(j, nir.i64(4 * BLOCK)))
            for tile in range(_SUMS):
                target = builder.add(place, nir.i64(4 * BLOCK * tile))
                amx.store_tile(builder, tile, target, nir.i64(4 * SEGMENT))
            return []

        nir.loop(builder, num_blocks, _SUMS, [], some_blocks)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), lower


@intrinsic(prefer_literal=True)
def _values(typing, chunks, weights, blocks, num_blocks, offset, dim, total):
    """total[m, c] += Σ_j weights[m, j] · V[j, c] of 16·`chunks` (a constant) columns, for the rows that the tiles have.
    `offset`: bytes from a block of V to those columns' first pair."""
    if not isinstance(chunks, types.IntegerLiteral):
        return None
    count = chunks.literal_value

    def lower(context, builder, signature, values):
        if not amx.has_tiles(context):
            return context.get_dummy_value()
        _, weights, blocks, num_blocks, offset, dim, total = values
        row_bytes = builder.mul(dim, nir.i64(4))
        places = [builder.add(total, nir.i64(64 * tile)) for tile in range(count)]
        for tile, place in enumerate(places):
            amx.load_tile(builder, tile, place, row_bytes)

        def add_block(j, _):
            block = nir.load(builder, builder.add(blocks, builder.mul(j, nir.i64(8))), nir.I64, 8)
            first = builder.add(block, offset)
            given = builder.add(weights, builder.mul(j, nir.i64(2 * BLOCK)))
            amx.load_tile(builder, _WEIGHTS, given, nir.i64(2 * SEGMENT))
            for tile in range(count):
                amx.load_tile(builder, _VALUES, builder.add(first, nir.i64(64 * tile)), row_bytes)
                amx.multiply_tiles(builder, tile, _WEIGHTS, _VALUES)
            return []

        nir.loop(builder, num_blocks, 1, [], add_block)
        for tile, place in enumerate(places):
            amx.store_tile(builder, tile, place, row_bytes)
        return context.get_dummy_value()

    return types.void(chunks, *[types.int64] * 6), lower


@jit
def all_scores(count, q, dim, blocks, num_blocks, scores, shapes):
    """Compute what `numba_attention_products.all_scores` does, with the shapes that `tile_shapes` returned."""
    for m in range(0, count, _ROWS):
        configure_tiles(shapes + (min(_ROWS, count - m) - 1) * 64)
        _scores(q + m * dim * 2, dim, blocks, num_blocks, scores + m * SEGMENT * 4)


@jit
def all_values(count, weights, blocks, num_blocks, dim, total, faded, shapes):
    """total[m] = total[m] · faded[m] + Σ_j weights[m, j] · V[j], for `count` vectors.

    As `numba_attention_products.all_values`, but blocks: address of [num_blocks] int64, of whole blocks of V.
    """
    for m in range(count):
        factor = splat(read_float32(faded + m * 4))
        for d in range(m * dim, m * dim + dim, 16):
            store(load(total + d * 4, _F32) * factor, total + d * 4, _F32)
    for m in range(0, count, _ROWS):
        configure_tiles(shapes + (min(_ROWS, count - m) - 1) * 64)
        given, target, column = weights + m * SEGMENT * 2, total + m * dim * 4, 0
        while column < dim:
            if dim - column >= 64:
                _values(4, given, blocks, num_blocks, column * 4, dim, target + column * 4)
                column += 64
            else:
                _values(2, given, blocks, num_blocks, column * 4, dim, target + column * 4)
                column += 32
