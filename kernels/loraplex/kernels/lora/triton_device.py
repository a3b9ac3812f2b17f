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

from loraplex.kernels.lora.triton_fields import LIST_FIELDS, PIECE_FIELDS, RECORD_HEAD, ROW_ROWS, UNIT_FIELDS
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


@triton.jit
def expand_item(
    y_ptr,
    y_stride,
    h_ptr,
    work_ptr,
    start,
    units_ptr,
    records_ptr,
    item,
    units,
    layer,
    first_site,
    num_sites,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A B side's item: its rows, where they begin in the site's y and in its hidden values, ranks a row and numbers a
    plane of these, the unit's first column, the site's columns, and its record. PARTS: of pieces that are cut from
    those of A sides."""
    piece_ptr = work_ptr + start + item // units * PIECE
    unit_ptr = units_ptr + item % units * UNIT
    first_row = tl.load(piece_ptr)
    num_rows = tl.load(piece_ptr + 1)
    slot = tl.load(piece_ptr + 2)
    h_first = tl.load(piece_ptr + 4)
    row_stride = tl.load(piece_ptr + 5)
    height = tl.load(piece_ptr + 6) if PARTS else num_rows
    site = tl.load(unit_ptr)
    h_site = tl.load(unit_ptr + 1)
    n_first = tl.load(unit_ptr + 2)
    num_columns = tl.load(unit_ptr + 3)
    y_first = tl.load(unit_ptr + 4)
    if ALIGNED:
        num_columns = tl.multiple_of(num_columns, 16)
        y_first = tl.multiple_of(y_first, 16)
        n_first = tl.multiple_of(n_first, 16)
    record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site + site) * (HEAD + 2 * MAX_CHUNKS)
    y_here = y_ptr + first_row.to(tl.int64) * y_stride + y_first
    h_here = h_ptr + h_first + h_site * height * row_stride
    plane_stride = num_sites * height * row_stride
    return num_rows, y_here, h_here, row_stride, plane_stride, n_first, num_columns, record_ptr
