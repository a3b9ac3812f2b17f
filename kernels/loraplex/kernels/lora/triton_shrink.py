"""Triton program of batched LoRA: the A side (see `loraplex.kernels.lora.triton_lora`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_device import CHUNK_RANKS, HEAD, LIST, PIECE, tile_rows, two_tiles

LANES = tl.constexpr(8)
"""Numbers of 16 bits in a load of 16 bytes."""
LINE = tl.constexpr(64)
"""Numbers of 16 bits in a line of the cache."""


@triton.jit
def _shrunk(
    x_ptr,
    x_stride,
    storage_ptr,
    has_rank,
    rank_row,
    num_rows,
    k_begin,
    k_end,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_R] float32, on tensor cores. Both operands come from memory."""
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for k_first in range(k_begin, k_end, BLOCK_K):
        k = k_first + column
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :],
            (row < num_rows)[:, None] & (k < K)[None, :],
            0.0,
        )
        a = tl.load(storage_ptr + rank_row[:, None] + k[None, :], has_rank[:, None] & (k < K)[None, :], 0.0)
        if x.dtype == a.dtype and x.dtype != tl.float32:
            total = tl.dot(x, tl.trans(a), total)
        else:
            total = tl.dot(x.to(tl.float32), tl.trans(a.to(tl.float32)), total, input_precision="ieee")
    return total


@triton.jit
def _shrink_rows(
    x_ptr,
    x_stride,
    storage_ptr,
    h_ptr,
    ranks,
    tile,
    following,
    k_begin,
    k_end,
    K,
    GRANULE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Hidden values of two chunks, one after the other, without tensor cores: a thread has LANES adjacent columns of
    all ranks of a chunk, loads of 16 bytes at once, and sums of its own until the last block. Loads of two dimensions
    are dealt out along K whatever the version of Triton; those of four, along the ranks in some.

    EARLY: A is loaded before the wait for what makes x.
    """
    row = tl.arange(0, ROWS)[:, None]
    rank = tl.arange(0, CHUNK_RANKS)
    for half in tl.static_range(2):
        chosen = tile if half == 0 else following
        if chosen > 0:
            a_ptr = storage_ptr + chosen.to(tl.int64) * GRANULE
            total = tl.zeros((ROWS, CHUNK_RANKS, BLOCK_K // LANES), tl.float32)
            for k_first in range(k_begin, k_end, BLOCK_K):
                k = k_first + tl.arange(0, BLOCK_K)[None, :]
                a = tl.load(a_ptr + rank[:, None] * K + k, k < k_end, 0.0).to(tl.float32)
                if EARLY:
                    tl.extra.cuda.gdc_wait()
                x = tl.load(x_ptr + row.to(tl.int64) * x_stride + k, k < k_end, 0.0).to(tl.float32)
                a = tl.reshape(a, (1, CHUNK_RANKS, BLOCK_K // LANES, LANES))
                x = tl.reshape(x, (ROWS, 1, BLOCK_K // LANES, LANES))
                total += tl.sum(x * a, axis=3)
            tl.store(h_ptr + row * ranks + half * CHUNK_RANKS + rank[None, :], tl.sum(total, axis=2))


@triton.jit
def _fetch(storage_ptr, has_rank, rank_row, k_begin, k_end, BLOCK_K: tl.constexpr):
    """Have a plane's part of A brought into the L2 cache, line by line."""
    for k_first in range(k_begin, k_end, BLOCK_K):
        k = k_first + tl.arange(0, BLOCK_K // LINE) * LINE
        there = has_rank[:, None] & (k < k_end)[None, :]
        at = storage_ptr + tl.where(there, rank_row[:, None] + k[None, :], 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _piece_of(work_ptr, start, item, units, num_items):
    """An item's first row, its rows, the slot, the first chunk, where its hidden values begin, and ranks a row.
    Zeros behind the last item."""
    there = item < num_items
    piece_ptr = work_ptr + start + item // units * PIECE
    return (
        tl.load(piece_ptr, there, 0),
        tl.load(piece_ptr + 1, there, 0),
        tl.load(piece_ptr + 2, there, 0),
        tl.load(piece_ptr + 3, there, 0),
        tl.load(piece_ptr + 4, there, 0),
        tl.load(piece_ptr + 5, there, 0),
    )


@triton.jit
def _site_of(
    records_ptr,
    slot,
    first_chunk,
    layer,
    site,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
):
    """The chunks of an adapter's site, and two A tiles from the first chunk on."""
    record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + site) * (HEAD + 2 * MAX_CHUNKS)
    tiles_ptr = record_ptr + HEAD + first_chunk
    return tl.load(record_ptr), tl.load(tiles_ptr), tl.load(tiles_ptr + 1, first_chunk + 1 < MAX_CHUNKS, 0)


@triton.jit(do_not_specialize=["which", "layer", "first_site", "num_sites"])
def shrink(
    x_ptr,
    x_stride,
    storage_ptr,
    h_ptr,
    work_ptr,
    records_ptr,
    which,
    layer,
    first_site,
    num_sites,
    K,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """h[plane, site, row, rank] = the sum over the plane's part of K of x[row, k] · A[rank, k], in float32.

    x [T, K] with rows x_stride apart; h flat: a piece's values [splits, num_sites, its rows, its ranks] begin where it
    says. The list is number `which` of `work`, whose head has the number of planes and how many columns one has. Units
    are (site, plane). ROW_K: pieces of one and of two rows are computed without tensor cores, that many columns at a
    time; none with 0. DEPENDENT: what is launched next may begin, and wait. EARLY: it may itself begin before x is
    there; lists, records and tiles are older.

    On tensor cores alone and of blocks of two chunks, a piece is loaded two items before it is computed, and where its
    tiles lie one item before: A's address waits for no other load then. Larger blocks have long items. They and sums by
    rows need the registers.
    """
    AHEAD: tl.constexpr = BLOCK_R == 2 * CHUNK_RANKS and ROW_K == 0
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    splits = max(tl.load(list_ptr + 2), 1)  # 0 before the first list is written
    split = tl.multiple_of(tl.load(list_ptr + 3), 16)
    units = num_sites * splits
    num_items = tl.load(list_ptr + 1) * units
    begin = tl.program_id(0)
    step = tl.num_programs(0)
    first_row, num_rows, slot, first_chunk, h_first, ranks = _piece_of(
        work_ptr, start, begin, units, num_items
    )
    site = begin % units // splits
    chunks, tile, following = _site_of(
        records_ptr, slot, first_chunk, layer, first_site + site, LAYERS, SITES, MAX_CHUNKS
    )
    next_row, next_rows, next_slot, next_chunk, next_h, next_ranks = _piece_of(
        work_ptr, start, begin + step, units, num_items
    )
    # By rows, what the tensor cores' part has before the loop would take registers from theirs.
    for item in tl.range(begin, num_items, step, disable_licm=ROW_K > 0):
        if AHEAD:
            later_row, later_rows, later_slot, later_chunk, later_h, later_ranks = _piece_of(
                work_ptr, start, item + 2 * step, units, num_items
            )
            next_site = (item + step) % units // splits
            next_chunks, next_tile, next_following = _site_of(
                records_ptr, next_slot, next_chunk, layer, first_site + next_site, LAYERS, SITES, MAX_CHUNKS
            )
        else:
            first_row, num_rows, slot, first_chunk, h_first, ranks = _piece_of(
                work_ptr, start, item, units, num_items
            )
            site = item % units // splits
            chunks, tile, following = _site_of(
                records_ptr, slot, first_chunk, layer, first_site + site, LAYERS, SITES, MAX_CHUNKS
            )
        if chunks > first_chunk:
            if BLOCK_R == 2 * CHUNK_RANKS:
                has_rank, rank_row = two_tiles(tile, following, K, GRANULE, BLOCK_R)
            else:
                record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site + site) * (
                    HEAD + 2 * MAX_CHUNKS
                )
                has_rank, rank_row = tile_rows(
                    record_ptr + HEAD, first_chunk, K, MAX_CHUNKS, GRANULE, BLOCK_R
                )
            plane = item % splits
            x_first = x_ptr + first_row.to(tl.int64) * x_stride
            h_here = (
                h_ptr + h_first + (plane * num_sites + site) * num_rows * ranks + first_chunk * CHUNK_RANKS
            )
            k_begin = plane * split
            k_end = min(k_begin + split, K)
            if ROW_K > 0 and num_rows == 1:
                _shrink_rows(
                    x_first, x_stride, storage_ptr, h_here, ranks, tile, following, k_begin, k_end, K,
                    GRANULE, 1, ROW_K, EARLY,
                )  # fmt: skip
            elif ROW_K > 0 and num_rows == 2:
                _shrink_rows(
                    x_first, x_stride, storage_ptr, h_here, ranks, tile, following, k_begin, k_end, K,
                    GRANULE, 2, ROW_K, EARLY,
                )  # fmt: skip
            else:
                if EARLY:
                    if item == begin:
                        _fetch(storage_ptr, has_rank, rank_row, k_begin, k_end, BLOCK_K)
                    tl.extra.cuda.gdc_wait()
                total = _shrunk(
                    x_first, x_stride, storage_ptr, has_rank, rank_row, num_rows, k_begin, k_end, K,
                    BLOCK_M, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                row = tl.arange(0, BLOCK_M)[:, None]
                rank = tl.arange(0, BLOCK_R)[None, :]
                tl.store(h_here + row * ranks + rank, total, (row < num_rows) & has_rank[None, :])
        if AHEAD:
            site, chunks, tile, following = next_site, next_chunks, next_tile, next_following
            first_row, num_rows, slot = next_row, next_rows, next_slot
            first_chunk, h_first, ranks = next_chunk, next_h, next_ranks
            next_row, next_rows, next_slot = later_row, later_rows, later_slot
            next_chunk, next_h, next_ranks = later_chunk, later_h, later_ranks
    if EARLY:
        # The B side reads y once this launch has ended: no program may end before what makes y, even without an item.
        tl.extra.cuda.gdc_wait()
