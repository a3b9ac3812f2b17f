"""The end of a product whose K is cut into splits, in Triton: their sums are added in their order.

A split is a program of its own, for few rows, or one program computes all of them: the numbers are the same.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_sums(
    total,
    bias_ptr,
    y_ptr,
    planes_ptr,
    arrived_ptr,
    m,
    n,
    has_row,
    has_column,
    num_rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    APART: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store `total` [BLOCK_N, BLOCK_M] float32, the sums of one split where APART, else of all, as the rows `m` and the
    columns `n` of y [num_rows, N]. Where APART, a program of the grid's first axis is a tile and one of its second a
    split; planes [SPLITS, num_rows, N] float32 holds their sums, and arrived [tiles] int32 how many of a tile are
    there. The last one of a tile adds them up, and sets its number back to 0."""
    y_at = m.to(tl.int64)[None, :] * N + n[:, None]
    here = has_column[:, None] & has_row[None, :]
    is_last = True
    if APART:
        plane = num_rows.to(tl.int64) * N
        tl.store(planes_ptr + tl.program_id(1) * plane + y_at, total, here)
        # All threads have stored before one of them tells the other programs, and none reads before that one knows.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
        if is_last:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for split in range(SPLITS):
                total += tl.load(planes_ptr + split * plane + y_at, here, 0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, has_column, 0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + y_at, total.to(y_ptr.dtype.element_ty), here)
