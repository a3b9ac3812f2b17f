"""The write into the paged KV cache in Triton, where nothing is fused with it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_kv(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K and V in one layer's cache, in place. kv: [T, 2, Hkv, D], K before V, rows contiguous; cache: [N, P, 2,
    Hkv, D] of the same dtype, positions contiguous; slots: [T] int32 or int64, -1 for nowhere. Raises ValueError for
    other shapes."""
    rows, width = kv.shape[0], kv[0].numel() if kv.shape[0] else 0
    if kv.shape[1:] != cache.shape[2:] or kv.dtype is not cache.dtype or slots.shape != (rows,):
        raise ValueError(
            f"{list(kv.shape)} {kv.dtype} does not fit a cache {list(cache.shape)} {cache.dtype}"
        )
    if not rows:
        return
    if not (kv[0].is_contiguous() and cache[0, 0].is_contiguous()):
        raise ValueError("a row's K and V, and a position's, must be contiguous")
    block = 1024
    write_program[(rows, triton.cdiv(width, block))](
        kv,
        cache,
        slots,
        kv.stride(0),
        cache.stride(0),
        cache.stride(1),
        WIDTH=width,
        BLOCK=block,
        BLOCK_SIZE=cache.shape[1],
        num_warps=4,
    )


@triton.jit
def write_program(
    kv_ptr,
    cache_ptr,
    slots_ptr,
    kv_row,
    cache_block,
    cache_position,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One row's K and V, WIDTH elements. Grid: rows, WIDTH ÷ BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(kv_ptr + row * kv_row + c, mask=c < WIDTH)
    to_ptr = cache_ptr + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_position
    tl.store(to_ptr + c, values, mask=c < WIDTH)
