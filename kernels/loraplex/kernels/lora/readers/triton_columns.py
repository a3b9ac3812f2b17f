"""Code that readers of a site's outputs share: columns of y as `expand` would leave them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_device import CHUNK_RANKS, HEAD, VECTOR_GRANULE
from loraplex.kernels.lora.triton_expand import update_by_rows, update_by_tiles, updated


@triton.jit
def updated_columns(
    y_ptr,  # at the piece's first row and the site's first column
    y_stride,
    storage_ptr,
    floats_ptr,
    h_ptr,
    plane_stride,
    row_stride,
    record_ptr,
    num_rows,
    splits,
    n,
    there,
    num_columns,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """[ROWS, BLOCK_N] float32: columns n of a site of num_columns, with their update, rounded as `expand` rounds them.
    `there` [BLOCK_N] says which of them are wanted; what it gives of the others means nothing."""
    num_ranks = tl.load(record_ptr) * CHUNK_RANKS
    vectors = tl.load(record_ptr + 1)
    tiles_ptr = record_ptr + HEAD + MAX_CHUNKS
    if BY_ROWS:
        update = update_by_rows(
            storage_ptr, h_ptr, plane_stride, row_stride, tiles_ptr, num_ranks, num_rows, splits,
            n, num_columns, MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    else:
        update = update_by_tiles(
            storage_ptr, h_ptr, plane_stride, row_stride, tiles_ptr, num_ranks, 0, num_rows, splits,
            n, num_columns, MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    row = tl.arange(0, ROWS)
    y = tl.load(
        y_ptr + row.to(tl.int64)[:, None] * y_stride + n[None, :],
        (row < num_rows)[:, None] & there[None, :],
        0.0,
    ).to(tl.float32)
    vectors_ptr = floats_ptr + vectors.to(tl.int64) * VECTOR_GRANULE
    total = updated(y, update, vectors_ptr, vectors > 0, n, num_columns)
    return total.to(y_ptr.dtype.element_ty).to(tl.float32)
