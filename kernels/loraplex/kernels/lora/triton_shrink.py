"""Triton program of batched LoRA: the A side (see `loraplex.kernels.lora.triton_lora`)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_device import CHUNK_RANKS, FEW_ROWS, HEAD, LIST, PIECE, tile_rows


@triton.jit
def _shrink_by_rows(
    x_ptr,  # at the piece's first row
    x_stride,
    storage_ptr,
    has_rank,
    rank_row,
    num_rows,
    k_begin,
    k_end,
    K,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[ROWS, BLOCK_R] float32, without tensor cores: each A element is read once and multiplied ROWS times."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_K)
    total = tl.zeros((ROWS, BLOCK_R), tl.float32)
    for k_first in range(k_begin, k_end, BLOCK_K):
        k = k_first + column
        a = tl.load(
            storage_ptr + rank_row[None, :, None] + k[None, None, :],
            has_rank[None, :, None] & (k < K)[None, None, :],
            0.0,
        )
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None, None] * x_stride + k[None, None, :],
            (row < num_rows)[:, None, None] & (k < K)[None, None, :],
            0.0,
        )
        total += tl.sum(x.to(tl.float32) * a.to(tl.float32), axis=2)
    return total


@triton.jit
def _shrink_by_tiles(
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
def _put_hidden(h_ptr, total, ranks, num_rows, has_rank, ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    row = tl.arange(0, ROWS)
    rank = tl.arange(0, BLOCK_R)
    tl.store(
        h_ptr + row[:, None] * ranks + rank[None, :], total, (row < num_rows)[:, None] & has_rank[None, :]
    )


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
    BY_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """h[plane, site, row, rank] = the sum over the plane's part of K of x[row, k] · A[rank, k], in float32.

    x [T, K] with rows x_stride apart; h flat: a piece's values [splits, num_sites, its rows, its ranks] begin where it
    says. The list is number `which` of `work`, whose head has the number of planes and how many columns one has. Units
    are (site, plane). Pieces of one row, and of a few, go without tensor cores where BY_ROWS. DEPENDENT: what is
    launched next may begin, and wait.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    splits = tl.load(list_ptr + 2)
    split = tl.multiple_of(tl.load(list_ptr + 3), 16)
    units = num_sites * splits
    num_items = tl.load(list_ptr + 1) * units
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        piece_ptr = work_ptr + start + item // units * PIECE
        first_row = tl.load(piece_ptr)
        num_rows = tl.load(piece_ptr + 1)
        slot = tl.load(piece_ptr + 2)
        first_chunk = tl.load(piece_ptr + 3)
        h_first = tl.load(piece_ptr + 4)
        ranks = tl.load(piece_ptr + 5)
        site = item % units // splits
        plane = item % splits
        record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site + site) * (
            HEAD + 2 * MAX_CHUNKS
        )
        if tl.load(record_ptr) > first_chunk:
            has_rank, rank_row = tile_rows(record_ptr + HEAD, first_chunk, K, MAX_CHUNKS, GRANULE, BLOCK_R)
            x_first = x_ptr + first_row.to(tl.int64) * x_stride
            h_here = (
                h_ptr + h_first + (plane * num_sites + site) * num_rows * ranks + first_chunk * CHUNK_RANKS
            )
            k_begin = plane * split
            k_end = min(k_begin + split, K)
            if BY_ROWS and num_rows == 1:
                one = _shrink_by_rows(
                    x_first, x_stride, storage_ptr, has_rank, rank_row, num_rows, k_begin, k_end, K,
                    1, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                _put_hidden(h_here, one, ranks, num_rows, has_rank, 1, BLOCK_R)
            elif BY_ROWS and num_rows <= FEW_ROWS:
                few = _shrink_by_rows(
                    x_first, x_stride, storage_ptr, has_rank, rank_row, num_rows, k_begin, k_end, K,
                    FEW_ROWS, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                _put_hidden(h_here, few, ranks, num_rows, has_rank, FEW_ROWS, BLOCK_R)
            else:
                many = _shrink_by_tiles(
                    x_first, x_stride, storage_ptr, has_rank, rank_row, num_rows, k_begin, k_end, K,
                    BLOCK_M, BLOCK_R, BLOCK_K,
                )  # fmt: skip
                _put_hidden(h_here, many, ranks, num_rows, has_rank, BLOCK_M, BLOCK_R)
