"""Rotary position embedding and the write into the paged KV cache in Triton, in one kernel."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.attention.kv_codes import head_dim_of, is_transformed, transform_factors
from loraplex.kernels.attention.triton_attention import cache_operands
from loraplex.kernels.layers.rope import check_norms

_HEADS_AT_A_TIME = 8
_LEAST_PRODUCT = 16
"""The fewest numbers that `tl.dot` sums."""


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
    v_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
) -> None:
    """`rope.apply_rope` on the queries and keys, then `torch_attention.write_kv`.

    heads: [T, Hq + 2·Hkv, D], the queries, keys and values of each row side by side, last axis contiguous; num_heads:
    Hq; cos, sin: [T, 1, R/2] float32, contiguous, R ≤ D; cache: one layer's [N, P, 2, Hkv, D], last axis contiguous,
    in the dtype of heads, or [N, P, 2, Hkv, D + 2] of codes, for which queries and keys are transformed
    (`loraplex.kernels.attention.kv_codes`); slots: [T] int32 or int64, -1 for a row whose K and V go nowhere. Queries
    are rotated in place. Keys and values go into the cache only: what `heads` has of them stays as it was. With q_norm
    and k_norm [D], each head first gets `norm.rms_norm` with that weight, rounded to the dtype of heads as there; with
    v_norm so do values. Heads of Hq + Hkv, or Hq, and gates behind queries as `loraplex.kernels.ops.RotateAndWrite`
    has them. Raises ValueError for other shapes.
    """
    gates = num_heads if gated else 0
    kinds = _check_heads(heads, num_heads + gates, cos, sin, cache, slots, q_norm, k_norm, v_norm)
    rows, _, head_dim = heads.shape
    half = cos.shape[-1]
    if not rows:
        return
    operands = cache_operands(cache)
    transform = operands.is_codes and is_transformed(head_dim)
    factors = transform_factors(head_dim) if transform else (1.0, 1.0)
    least = _LEAST_PRODUCT if transform else 1
    all_heads = num_heads + (2 * cache.shape[3] if kinds else 0)
    rope_program[(rows, triton.cdiv(all_heads, _HEADS_AT_A_TIME))](
        heads,
        cos,
        sin,
        cache,
        operands.scales,
        slots,
        heads if q_norm is None else q_norm,
        heads if k_norm is None else k_norm,
        heads if v_norm is None else v_norm,
        eps,
        *factors,
        heads.stride(0),
        heads.stride(1),
        *operands.strides,
        operands.scales_kind,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=cache.shape[3],
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(max(least, half)),
        BLOCK_REST=triton.next_power_of_2(max(least, head_dim - 2 * half)),
        BLOCK_HEADS=_HEADS_AT_A_TIME,
        BLOCK_SIZE=cache.shape[1],
        KINDS=kinds,
        GATES=gates,
        NORM=q_norm is not None,
        V_NORM=v_norm is not None,
        CODES=operands.is_codes,
        TRANSFORM=transform,
        num_warps=4,
    )


def _check_heads(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    v_norm: torch.Tensor | None,
) -> int:
    """How many of keys and values lie behind the queries. Raises ValueError where these do not fit each other as
    `rope_and_write_kv` says."""
    rows, all_heads, head_dim = heads.shape
    num_kv_heads = cache.shape[3]
    kinds = (all_heads - num_heads) // num_kv_heads
    half = cos.shape[-1]
    if (
        all_heads != num_heads + kinds * num_kv_heads
        or kinds not in ((0, 2) if v_norm is None else (0, 1, 2))
        or head_dim_of(cache) != head_dim
        or cache.dtype not in (heads.dtype, torch.int8)
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
    check_norms(q_norm, k_norm, v_norm, head_dim, kinds)
    return kinds


@triton.jit
def rope_program(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    cache_ptr,
    scales_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    v_norm_ptr,
    eps,
    q_factor,
    k_factor,
    heads_row,
    heads_head,
    cache_block,
    cache_position,
    cache_kind,
    cache_head,
    scales_kind,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KINDS: tl.constexpr,
    GATES: tl.constexpr,
    NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    CODES: tl.constexpr,
    TRANSFORM: tl.constexpr,
):
    """Norm heads where NORM, values too where V_NORM, rotate queries and keys, and store queries where they lie and
    keys and values in the cache.

    BLOCK_HEADS heads of one row. Grid: rows, heads ÷ BLOCK_HEADS. A head is a | b | c, of HALF, HALF and what remains;
    (a, b) → (a·cos - b·sin, b·cos + a·sin). KINDS: how many of keys and values lie behind the queries; 1: values are
    the keys. GATES: how many lie between queries, one behind each, or 0. CODES: the cache is of codes, with its scales
    at `scales_ptr`. TRANSFORM: queries, and keys before they become codes, are transformed and multiplied by `q_factor`
    and `k_factor`.
    """
    dtype = heads_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    r = tl.arange(0, BLOCK_HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    there = head < NUM_HEADS + (2 * NUM_KV_HEADS if KINDS > 0 else 0)
    turned = head < NUM_HEADS + NUM_KV_HEADS
    halves = there & (r < HALF)
    rests = there & (rest < HEAD_DIM)
    source = head
    if KINDS == 1:
        source = tl.where(turned, head, head - NUM_KV_HEADS)
    if GATES > 0:
        source += tl.where(head < NUM_HEADS, head, GATES)
    head_ptr = heads_ptr + row * heads_row + source * heads_head
    a = tl.load(head_ptr + r, mask=halves, other=0.0).to(tl.float32)
    b = tl.load(head_ptr + HALF + r, mask=halves, other=0.0).to(tl.float32)
    c = a
    if HEAD_DIM > 2 * HALF:
        c = tl.load(head_ptr + rest, mask=rests, other=0.0).to(tl.float32)
    is_q = head < NUM_HEADS
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + row * HALF + r, r < HALF, 0.0)
    sin = tl.load(sin_ptr + row * HALF + r, r < HALF, 0.0)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(c * c, 1)
        grow = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a = _normed(a, q_norm_ptr, k_norm_ptr, v_norm_ptr, is_q, turned, r, r < HALF, grow, V_NORM, dtype)
        b = _normed(
            b, q_norm_ptr, k_norm_ptr, v_norm_ptr, is_q, turned, HALF + r, r < HALF, grow, V_NORM, dtype
        )
        if HEAD_DIM > 2 * HALF:
            is_rest = rest < HEAD_DIM
            c = _normed(
                c, q_norm_ptr, k_norm_ptr, v_norm_ptr, is_q, turned, rest, is_rest, grow, V_NORM, dtype
            )
    x = tl.where(turned, a * cos - b * sin, a).to(dtype)
    y = tl.where(turned, b * cos + a * sin, b).to(dtype)
    z = c.to(dtype)
    if TRANSFORM:
        factor = tl.where(is_q, q_factor, k_factor)
        u, v, w = _transformed(x, y, z, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST)
        x = tl.where(turned, u * factor, x.to(tl.float32))
        y = tl.where(turned, v * factor, y.to(tl.float32))
        if HEAD_DIM > 2 * HALF:
            z = tl.where(turned, w * factor, z.to(tl.float32))
    tl.store(head_ptr + r, x.to(dtype), mask=halves & is_q)
    tl.store(head_ptr + HALF + r, y.to(dtype), mask=halves & is_q)
    if (NORM or TRANSFORM) and HEAD_DIM > 2 * HALF:
        tl.store(head_ptr + rest, z.to(dtype), mask=rests & is_q)
    kind = (head - NUM_HEADS) // NUM_KV_HEADS
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    kv_ptr = cache_ptr + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_position
    kv_ptr = kv_ptr + kind * cache_kind + kv_head * cache_head
    written = (slot >= 0) & (head >= NUM_HEADS)
    if CODES:
        x = tl.where(halves, x.to(tl.float32), 0.0)
        y = tl.where(halves, y.to(tl.float32), 0.0)
        peak = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        # NaN where a number is not finite, else 0.
        spoilt = tl.sum(x * 0.0, 1) + tl.sum(y * 0.0, 1)
        if HEAD_DIM > 2 * HALF:
            z = tl.where(rests, z.to(tl.float32), 0.0)
            peak = tl.maximum(peak, tl.max(tl.abs(z), 1))
            spoilt += tl.sum(z * 0.0, 1)
        scale = (tl.minimum(peak * (1 / 127), 65504.0) + spoilt).to(tl.float16)[:, None]
        own = scale.to(tl.float32)
        inverse = tl.where(own > 0, 1 / own, 0.0)
        x = _codes(x * inverse)
        y = _codes(y * inverse)
        if HEAD_DIM > 2 * HALF:
            z = _codes(z * inverse)
        scale_at = slot // BLOCK_SIZE * (cache_block // 2) + slot % BLOCK_SIZE
        scale_at = scale_at + kind * scales_kind + kv_head * BLOCK_SIZE
        tl.store(scales_ptr + scale_at, scale, mask=written & there)
    tl.store(kv_ptr + r, x, mask=halves & written)
    tl.store(kv_ptr + HALF + r, y, mask=halves & written)
    if HEAD_DIM > 2 * HALF:
        tl.store(kv_ptr + rest, z, mask=rests & written)


@triton.jit
def _transformed(
    x,
    y,
    z,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """`loraplex.kernels.attention.kv_codes.hadamard` of heads x | y | z, each [heads, BLOCK] in one dtype, with zeros
    where a head has no number. Three float32 of the same shapes; the last means nothing where there is no rest."""
    r = tl.arange(0, BLOCK_HALF)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        u = _sums(x, y, z, r, rest, r, HALF)
        v = _sums(x, y, z, r, rest, HALF + r, HALF)
        w = _sums(x, y, z, r, rest, rest, HALF)
    else:
        # The halves' own transforms, and a butterfly.
        signs = _signs(r, r, x.dtype)
        p = tl.dot(x, signs, input_precision="ieee")
        q = tl.dot(y, signs, input_precision="ieee")
        u = p + q
        v = p - q
        w = u
    return u, v, w


@triton.jit
def _sums(x, y, z, r, rest, to, HALF: tl.constexpr):
    """The numbers `to` of the transform of heads x | y | z."""
    found = tl.dot(x, _signs(r, to, x.dtype), input_precision="ieee")
    found += tl.dot(y, _signs(HALF + r, to, x.dtype), input_precision="ieee")
    return found + tl.dot(z, _signs(rest, to, x.dtype), input_precision="ieee")


@triton.jit
def _signs(i, j, dtype: tl.constexpr):
    """[I, J]: -1 where i & j has an odd number of ones, else 1."""
    ones = i[:, None] & j[None, :]
    ones ^= ones >> 8
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    return (1 - 2 * (ones & 1)).to(dtype)


@triton.jit
def _codes(x):
    """The nearest of -127 … 127, ties to even; any for a NaN."""
    x = tl.where(x > -127.0, x, -127.0)
    x = tl.where(x < 127.0, x, 127.0)
    return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _normed(
    x,
    q_norm_ptr,
    k_norm_ptr,
    v_norm_ptr,
    is_q,
    turned,
    at,
    there,
    grow,
    V_NORM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Heads with their norm's weight, rounded; values as they are unless V_NORM."""
    q_weight = tl.load(q_norm_ptr + at, mask=there, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + at, mask=there, other=0.0).to(tl.float32)
    weight = tl.where(is_q, q_weight, k_weight)
    if V_NORM:
        weight = tl.where(turned, weight, tl.load(v_norm_ptr + at, mask=there, other=0.0).to(tl.float32))
    normed = (x * grow * weight).to(dtype).to(tl.float32)
    if not V_NORM:
        normed = tl.where(turned, normed, x)
    return normed
