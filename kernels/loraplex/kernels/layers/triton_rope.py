"""Rotary position embedding and the write into the paged KV cache in Triton, in one kernel."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_AT_A_TIME = 8


def rope_and_write_kv(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """`rope.apply_rope` on the queries and keys, then `attention.write_kv`.

    heads: [T, Hq + 2·Hkv, D], the queries, keys and values of each row side by side, last axis contiguous; num_heads:
    Hq; cos, sin: [T, 1, R/2] float32, contiguous, R ≤ D; cache: one layer's [N, P, 2, Hkv, D], last axis contiguous,
    in the dtype of heads; slots: [T] int32 or int64, -1 for a row whose K and V go nowhere. Queries are rotated in
    place. Keys and values go into the cache only: what `heads` has of them stays as it was. With q_norm and k_norm
    [D], each head first gets `norm.rms_norm` with that weight, rounded to the dtype of heads as there. Raises
    ValueError for other shapes.
    """
    rows, all_heads, head_dim = heads.shape
    num_kv_heads = cache.shape[3]
    half = cos.shape[-1]
    if (
        all_heads != num_heads + 2 * num_kv_heads
        or cache.shape[4] != head_dim
        or cache.dtype is not heads.dtype
        or 2 * half > head_dim
        or cos.shape != (rows, 1, half)
        or sin.shape != cos.shape
        or slots.shape != (rows,)
        or heads.stride(-1) != 1
        or cache.stride(-1) != 1
        or not (cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous())
    ):
        raise ValueError(
            f"heads {list(heads.shape)} {heads.dtype} with cos {list(cos.shape)} do not fit a cache "
            f"{list(cache.shape)} {cache.dtype} and {num_heads} query heads"
        )
    if (q_norm is None) is not (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither")
    for weight in (q_norm, k_norm):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"a norm's weight of {list(weight.shape)} does not fit heads of size {head_dim}")
    if not rows:
        return
    block, position, kind, head, _ = cache.stride()
    rope_program[(rows, triton.cdiv(all_heads, _HEADS_AT_A_TIME))](
        heads,
        cos,
        sin,
        cache,
        slots,
        heads if q_norm is None else q_norm,
        heads if k_norm is None else k_norm,
        eps,
        heads.stride(0),
        heads.stride(1),
        block,
        position,
        kind,
        head,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        BLOCK_HEADS=_HEADS_AT_A_TIME,
        BLOCK_SIZE=cache.shape[1],
        NORM=q_norm is not None,
        num_warps=4,
    )


@triton.jit
def rope_program(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    heads_row,
    heads_head,
    cache_block,
    cache_position,
    cache_kind,
    cache_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """BLOCK_HEADS heads of one row. Grid: rows, heads ÷ BLOCK_HEADS. A head is a | b | rest, of HALF, HALF and what
    remains; (a, b) → (a·cos - b·sin, b·cos + a·sin)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    r = tl.arange(0, BLOCK_HALF)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    there = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_q = head < NUM_HEADS
    turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    halves = there[:, None] & (r < HALF)[None, :]
    rests = there[:, None] & (rest < HEAD_DIM)[None, :]
    head_ptr = heads_ptr + row * heads_row + (head * heads_head)[:, None]
    a = tl.load(head_ptr + r[None, :], mask=halves, other=0.0).to(tl.float32)
    b = tl.load(head_ptr + HALF + r[None, :], mask=halves, other=0.0).to(tl.float32)
    c = tl.load(head_ptr + rest[None, :], mask=rests, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)) / HEAD_DIM
        grow = tl.rsqrt(mean + eps)[:, None]
        a = _normed(a, q_norm_ptr, k_norm_ptr, is_q, turned, r, r < HALF, grow, heads_ptr.dtype.element_ty)
        b = _normed(
            b, q_norm_ptr, k_norm_ptr, is_q, turned, HALF + r, r < HALF, grow, heads_ptr.dtype.element_ty
        )
        c = _normed(
            c, q_norm_ptr, k_norm_ptr, is_q, turned, rest, rest < HEAD_DIM, grow, heads_ptr.dtype.element_ty
        )
    cos = tl.load(cos_ptr + row * HALF + r, mask=r < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + r, mask=r < HALF, other=0.0)[None, :]
    dtype = heads_ptr.dtype.element_ty
    turned_a = tl.where(turned, a * cos - b * sin, a).to(dtype)
    turned_b = tl.where(turned, b * cos + a * sin, b).to(dtype)
    own = is_q[:, None]
    tl.store(head_ptr + r[None, :], turned_a, mask=halves & own)
    tl.store(head_ptr + HALF + r[None, :], turned_b, mask=halves & own)
    if NORM:
        tl.store(head_ptr + rest[None, :], c.to(dtype), mask=rests & own)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    stored = (slot >= 0) & (head >= NUM_HEADS)[:, None]
    kind = (head - NUM_HEADS) // NUM_KV_HEADS
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    kv_ptr = cache_ptr + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_position
    kv_ptr = kv_ptr + (kind * cache_kind + kv_head * cache_head)[:, None]
    tl.store(kv_ptr + r[None, :], turned_a, mask=halves & stored)
    tl.store(kv_ptr + HALF + r[None, :], turned_b, mask=halves & stored)
    tl.store(kv_ptr + rest[None, :], c.to(dtype), mask=rests & stored)


@triton.jit
def _normed(x, q_norm_ptr, k_norm_ptr, is_q, turned, at, there, grow, dtype: tl.constexpr):
    """Queries and keys with their norm's weight, rounded; values as they are."""
    q_weight = tl.load(q_norm_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]
    k_weight = tl.load(k_norm_ptr + at, mask=there, other=0.0).to(tl.float32)[None, :]
    normed = x * grow * tl.where(is_q[:, None], q_weight, k_weight)
    return tl.where(turned, normed.to(dtype).to(tl.float32), x)
