"""Triton program of batched LoRA: the B side of gate and up, with the activation that reads them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from loraplex.kernels.layers.triton_activation import activated
from loraplex.kernels.lora.readers.triton_columns import updated_columns
from loraplex.kernels.lora.triton_device import FEW_ROWS, HEAD, LIST, PIECE


@triton.jit
def _gated_piece(
    y_ptr,  # at the piece's first row
    y_stride,
    out_ptr,
    storage_ptr,
    floats_ptr,
    h_ptr,
    plane_stride,
    row_stride,
    record_ptr,
    num_rows,
    splits,
    n,
    INNER: tl.constexpr,
    SPLIT_SITES: tl.constexpr,
    GELU: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BY_ROWS: tl.constexpr,
):
    """Columns n of a piece's rows."""
    gate = updated_columns(
        y_ptr, y_stride, storage_ptr, floats_ptr, h_ptr, plane_stride, row_stride, record_ptr, num_rows,
        splits, n, n < INNER, INNER if SPLIT_SITES else 2 * INNER,
        MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK_N, BY_ROWS,
    )  # fmt: skip
    # Of two sites the second one's hidden values follow those of the first.
    up_ptr = y_ptr
    up_h_ptr = h_ptr
    up_record_ptr = record_ptr
    up_n = INNER + n
    if SPLIT_SITES:
        up_ptr = y_ptr + INNER
        up_h_ptr = h_ptr + num_rows * row_stride
        up_record_ptr = record_ptr + HEAD + 2 * MAX_CHUNKS
        up_n = n
    up = updated_columns(
        up_ptr, y_stride, storage_ptr, floats_ptr, up_h_ptr, plane_stride, row_stride, up_record_ptr,
        num_rows, splits, up_n, n < INNER, INNER if SPLIT_SITES else 2 * INNER,
        MAX_CHUNKS, GRANULE, PLANES, ROWS, BLOCK_R, BLOCK_N, BY_ROWS,
    )  # fmt: skip
    row = tl.arange(0, ROWS)
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * INNER + n[None, :],
        activated(gate, up, GELU).to(out_ptr.dtype.element_ty),
        (row < num_rows)[:, None] & (n < INNER)[None, :],
    )


@triton.jit(do_not_specialize=["which", "rows_list", "layer", "first_site"])
def expand_gated(
    y_ptr,
    y_stride,
    out_ptr,
    storage_ptr,
    floats_ptr,
    h_ptr,
    work_ptr,
    records_ptr,
    which,
    rows_list,
    layer,
    first_site,
    INNER: tl.constexpr,
    SPLIT_SITES: tl.constexpr,
    GELU: tl.constexpr,
    LAYERS: tl.constexpr,
    SITES: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    GRANULE: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BASE_N: tl.constexpr,
    BY_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[row, c] = f(gate[row, c]) · up[row, c] in float32, of gate and up as `expand` would leave them in y, which
    stays as it is.

    y [T, 2·INNER] with rows y_stride apart, out [T, INNER]. Items are BLOCK_N columns of the pieces of list `which`,
    of up to BLOCK_M rows, and BASE_N columns of the rows that are in no piece. SPLIT_SITES: gate and up are two sites,
    not one. DEPENDENT as for `expand`.
    """
    list_ptr = work_ptr + LIST * which
    start = tl.load(list_ptr)
    units = tl.cdiv(INNER, BLOCK_N)
    num_items = tl.load(list_ptr + 1) * units
    splits = tl.load(list_ptr + 2)
    rows_ptr = work_ptr + LIST * rows_list
    base_start = tl.load(rows_ptr + 2)
    base_units = tl.cdiv(INNER, BASE_N)
    base_items = tl.load(rows_ptr + 3) * base_units
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for item in range(tl.program_id(0), num_items + base_items, tl.num_programs(0)):
        if item < num_items:
            piece_ptr = work_ptr + start + item // units * PIECE
            n = item % units * BLOCK_N + tl.arange(0, BLOCK_N)
            first_row = tl.load(piece_ptr).to(tl.int64)
            num_rows = tl.load(piece_ptr + 1)
            slot = tl.load(piece_ptr + 2)
            h_here = h_ptr + tl.load(piece_ptr + 4)
            row_stride = tl.load(piece_ptr + 5)
            record_ptr = records_ptr + ((slot * LAYERS + layer) * SITES + first_site) * (
                HEAD + 2 * MAX_CHUNKS
            )
            y_here = y_ptr + first_row * y_stride
            out_here = out_ptr + first_row * INNER
            plane_stride = (2 if SPLIT_SITES else 1) * num_rows * row_stride
            if BY_ROWS and num_rows == 1:
                _gated_piece(
                    y_here, y_stride, out_here, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, num_rows, splits, n, INNER, SPLIT_SITES, GELU,
                    MAX_CHUNKS, GRANULE, PLANES, 1, BLOCK_R, BLOCK_N, True,
                )  # fmt: skip
            elif BY_ROWS and num_rows <= FEW_ROWS:
                _gated_piece(
                    y_here, y_stride, out_here, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, num_rows, splits, n, INNER, SPLIT_SITES, GELU,
                    MAX_CHUNKS, GRANULE, PLANES, FEW_ROWS, BLOCK_R, BLOCK_N, True,
                )  # fmt: skip
            else:
                _gated_piece(
                    y_here, y_stride, out_here, storage_ptr, floats_ptr, h_here, plane_stride, row_stride,
                    record_ptr, num_rows, splits, n, INNER, SPLIT_SITES, GELU,
                    MAX_CHUNKS, GRANULE, PLANES, BLOCK_M, BLOCK_R, BLOCK_N, False,
                )  # fmt: skip
        else:
            other = item - num_items
            row = tl.load(work_ptr + base_start + other // base_units).to(tl.int64)
            c = other % base_units * BASE_N + tl.arange(0, BASE_N)
            gate_ptr = y_ptr + row * y_stride + c
            gate = tl.load(gate_ptr, c < INNER, 0.0).to(tl.float32)
            up = tl.load(gate_ptr + INNER, c < INNER, 0.0).to(tl.float32)
            tl.store(
                out_ptr + row * INNER + c, activated(gate, up, GELU).to(out_ptr.dtype.element_ty), c < INNER
            )
