"""Triton program of batched LoRA: the B side of a site, with the residual addition and the norm that read it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.lora.triton_device import CHUNK_RANKS, HEAD, LIST, PIECE, VECTOR_GRANULE
from loraplex.kernels.lora.triton_expand import update_by_rows, updated


@triton.jit(do_not_specialize=["which", "rows_list", "layer", "first_site"])
def expand_norm(
    y_ptr,
    y_stride,
    residual_ptr,
    residual_stride,
    out_ptr,
    weight_ptr,
    eps,
    storage_ptr,
    floats_ptr,
    h_ptr,
    work_ptr,
    records_ptr,
    which,
    rows_list,
    layer,
    first_site,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row: its norm, of y as `expand` would leave it, and with ADD of residual += y; y stays as it is.

    y, residual [T, COLUMNS] with rows apart by their strides, out [T, COLUMNS]. Grid: rows. The list of rows says which
    piece of list `which` a row is in, -1 for a row of the base, which looks up nothing else; rows behind its end are
    the base's too. DEPENDENT as for `expand`.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    there = c < COLUMNS
    rows_ptr = work_ptr + LIST * rows_list
    piece = tl.load(work_ptr + tl.load(rows_ptr) + row, row < tl.load(rows_ptr + 1), -1)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    x = tl.load(y_ptr + row.to(tl.int64) * y_stride + c, there, 0.0).to(tl.float32)
    if piece >= 0:
        list_ptr = work_ptr + LIST * which
        splits = tl.load(list_ptr + 2)
        piece_ptr = work_ptr + tl.load(list_ptr) + piece * PIECE
        first_row = tl.load(piece_ptr)
        num_rows = tl.load(piece_ptr + 1)
        slot = tl.load(piece_ptr + 2)
        row_stride = tl.load(piece_ptr + 5)
        h_here = h_ptr + tl.load(piece_ptr + 4) + (row - first_row) * row_stride
        record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site) * (HEAD + 2 * MAX_CHUNKS)
        num_ranks = tl.load(record_ptr) * CHUNK_RANKS
        vectors = tl.load(record_ptr + 1)
        update = update_by_rows(
            storage_ptr, h_here, num_rows * row_stride, row_stride, record_ptr + HEAD + MAX_CHUNKS, num_ranks,
            1, splits, c, COLUMNS, MAX_CHUNKS, GRANULE, PLANES, 1, BLOCK_R, BLOCK,
        )  # fmt: skip
        vectors_ptr = floats_ptr + vectors.to(tl.int64) * VECTOR_GRANULE
        total = updated(x[None, :], update, vectors_ptr, vectors > 0, c, COLUMNS)
        # One row: nothing is added up.
        x = tl.sum(total.to(y_ptr.dtype.element_ty).to(tl.float32), axis=0)
    if ADD:
        sum_ptr = residual_ptr + row.to(tl.int64) * residual_stride + c
        rounded = (x + tl.load(sum_ptr, there, 0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(sum_ptr, rounded, there)
        x = rounded.to(tl.float32)
    # What lies behind the last column is not a part of the row.
    x = tl.where(there, x, 0.0)
    weight = tl.load(weight_ptr + c, there, 0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / COLUMNS + eps) * weight
    tl.store(out_ptr + row.to(tl.int64) * COLUMNS + c, normed.to(out_ptr.dtype.element_ty), there)
