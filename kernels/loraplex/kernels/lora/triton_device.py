"""Code that both programs of batched LoRA share: they read lists, records and tiles
(`loraplex.kernels.lora.triton_plan`).

Both walk a list of pieces, rows of one adapter, that the host writes: programs share out the pairs of a piece and a
unit, which is a part of a site's columns. No program waits for another, none adds to what another writes.

Where an adapter's tiles lie is read from its records: for each (slot, layer, site) the number of chunks, the offset of
its vectors, the offsets of its A tiles and those of its B tiles, in granules, 0 for none.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_plan import LIST_FIELDS, PIECE_FIELDS, RECORD_HEAD, UNIT_FIELDS
from loraplex.kernels.lora.triton_tiling import ROW_ROWS
from loraplex.kernels.lora.types import CHUNK, GRANULE_BYTES

CHUNK_RANKS = tl.constexpr(CHUNK)
VECTOR_GRANULE = tl.constexpr(GRANULE_BYTES // 4)
LIST = tl.constexpr(LIST_FIELDS)
PIECE = tl.constexpr(PIECE_FIELDS)
UNIT = tl.constexpr(UNIT_FIELDS)
HEAD = tl.constexpr(RECORD_HEAD)
FEW_ROWS = tl.constexpr(ROW_ROWS)


@triton.jit
def tile_rows(
    tiles_ptr,
    first_chunk,
    columns,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Two vectors for BLOCK_R ranks from a chunk's first on: whether the adapter has them, and where their rows
    begin."""
    rank = tl.arange(0, BLOCK_R)
    chunk = first_chunk + rank // CHUNK_RANKS
    tile = tl.load(tiles_ptr + chunk, chunk < MAX_CHUNKS, 0)
    return tile > 0, tile.to(tl.int64) * GRANULE + rank % CHUNK_RANKS * columns


@triton.jit
def two_tiles(tile, following, columns, GRANULE: tl.constexpr, BLOCK_R: tl.constexpr):
    """The same of the ranks of two chunks, whose tiles are known."""
    rank = tl.arange(0, BLOCK_R)
    chosen = tl.where(rank < CHUNK_RANKS, tile, following)
    return chosen > 0, chosen.to(tl.int64) * GRANULE + rank % CHUNK_RANKS * columns
