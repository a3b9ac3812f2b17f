"""What is fused around the products of a layer, on a CPU, compiled by numba: residual and norm, activation and gate,
rotation and the write into the KV cache. Shapes and rounding of `loraplex.kernels.norm`, `.activation` and `.rope`.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit

from loraplex.kernels import dense_numba
from loraplex.kernels.attention_numba import (
    NumbaAttentionBatch,
    build_attention_batch,
    key_value_offsets,
    paged_attention,
)
from loraplex.kernels.attention_numba_tiles import BLOCK
from loraplex.kernels.numba_team import Kernel, num_threads
from loraplex.kernels.numba_vectors import (
    JIT,
    LIKE,
    copy_element,
    exp,
    fetch_add,
    fma,
    horizontal_sum,
    load_some,
    read_float64,
    read_int64,
    rounded,
    size_of,
    splat,
    store_some,
)
from loraplex.kernels.ops import Ops

SMALL = 1 << 15
"""Elements that one thread is done with before it has woken another."""

_F32, _ONE = np.float32(0), np.float32(1)
_key_value_offsets = njit(**JIT)(key_value_offsets)


def numba_ops() -> Ops:
    """For tensors on a CPU, of a dtype of `numba_vectors.LIKE`."""
    return Ops(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        # The kernel takes the weight in its own dtype and rounds once after it, which is Gemma's way too.
        rms_norm_float32=rms_norm,
        add_rms_norm_float32=add_rms_norm,
        silu_and_mul=silu_and_mul,
        gelu_tanh_and_mul=gelu_tanh_and_mul,
        rotate_and_write=rotate_and_write,
        paged_attention=paged_attention,
        pack_weight=dense_numba.pack_weight,
        linear=dense_numba.linear,
        reads_unwritten=False,
        lay_out=build_attention_batch,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in float32 inside, rounded once.

    x: [..., C]; weight: [C] of any dtype of `LIKE`; returns a contiguous tensor of x's shape and dtype. Raises
    ValueError for other shapes.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    columns = x.shape[-1]
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    rows = x.numel() // columns if columns else 0
    _norm(x, x.stride(0) if x.dim() == 2 else columns, None, out, rows, weight, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x, in place; returns rms_norm(residual), of what the sum was rounded to. x, residual: [T, C] of one
    dtype, last axis contiguous."""
    if (
        x.shape != residual.shape
        or x.dtype is not residual.dtype
        or x.dim() != 2
        or x.stride(1) != 1
        or residual.stride(1) != 1
    ):
        raise ValueError(
            f"{list(x.shape)} {x.dtype} can't be added to {list(residual.shape)} {residual.dtype} by rows"
        )
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm(x, x.stride(0), residual, out, x.shape[0], weight, eps)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up. gate_up: [T, 2·I], gate before up, last axis contiguous; returns [T, I]."""
    return _activate(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) · up with the tanh approximation. Shapes as in `silu_and_mul`."""
    return _activate(gate_up, is_gelu=True)


def rotate_and_write(
    heads: torch.Tensor,
    num_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: NumbaAttentionBatch,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> None:
    """`loraplex.kernels.ops.RotateAndWrite`, into a cache in the order of `loraplex.kernels.attention_numba`.

    The last two axes of `heads` are contiguous, D is even, and `cos` and `sin` are contiguous float32. Raises
    ValueError for other shapes.
    """
    rows, all_heads, dim = heads.shape
    kv_heads, half = cache.shape[3], cos.shape[-1]
    if (
        all_heads != num_heads + 2 * kv_heads
        or cache.shape[1:] != (BLOCK, 2, kv_heads, dim)
        or cache.dtype is not heads.dtype
        or dim % 2
        or 2 * half > dim
        or cos.shape != (rows, 1, half)
        or sin.shape != cos.shape
        or batch.num_rows != rows
        or heads.stride()[1:] != (dim, 1)
        or cos.dtype is not torch.float32
        or sin.dtype is not torch.float32
        or not (cache.is_contiguous() and cos.is_contiguous() and sin.is_contiguous())
    ):
        raise ValueError(
            f"heads {list(heads.shape)} {heads.dtype} with cos {list(cos.shape)} do not fit a cache "
            f"{list(cache.shape)} {cache.dtype}, {num_heads} query heads and {batch.num_rows} rows"
        )
    if (q_norm is None) is not (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither")
    for weight in (q_norm, k_norm):
        if weight is not None and (weight.shape != (dim,) or not weight.is_contiguous()):
            raise ValueError(f"a norm's weight of {list(weight.shape)} does not fit heads of size {dim}")
    if q_norm is not None and k_norm is not None and q_norm.dtype is not k_norm.dtype:
        raise ValueError(f"norms of {q_norm.dtype} and {k_norm.dtype} do not go together")
    arguments = (
        LIKE[heads.dtype],
        LIKE[heads.dtype if q_norm is None else q_norm.dtype],
        heads.data_ptr(),
        heads.stride(0) * heads.element_size(),
        num_heads,
        kv_heads,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        half,
        cache.data_ptr(),
        batch.slots.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        float(eps),
    )
    if rows * all_heads * dim <= SMALL:
        _rotate_rows(*arguments, 0, rows)
    else:
        _rotate.run(arguments[:2], *arguments[2:], rows, _share(rows))


def _norm(x, stride, residual, out, rows, weight, eps) -> None:
    columns = x.shape[-1]
    if weight.shape != (columns,) or not weight.is_contiguous():
        raise ValueError(f"a norm's weight of {list(weight.shape)} does not fit rows of {columns}")
    size = x.element_size()
    arguments = (
        LIKE[x.dtype],
        LIKE[weight.dtype],
        x.data_ptr(),
        stride * size,
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0) * size,
        out.data_ptr(),
        weight.data_ptr(),
        columns,
        float(eps),
    )
    if rows * columns <= SMALL:
        _norm_rows(*arguments, 0, rows)
    else:
        _norm_all.run(arguments[:2], *arguments[2:], rows, _share(rows))


def _activate(gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"{list(gate_up.shape)} are not rows of a gate and what it is for")
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, columns), dtype=gate_up.dtype)
    arguments = (
        LIKE[gate_up.dtype],
        gate_up.data_ptr(),
        gate_up.stride(0) * gate_up.element_size(),
        out.data_ptr(),
        columns,
        int(is_gelu),
    )
    if rows * columns <= SMALL // 2:
        _activate_rows(*arguments, 0, rows)
    else:
        _activate_all.run(arguments[:1], *arguments[1:], rows, _share(rows))
    return out


def _share(rows: int) -> int:
    """Rows of a unit."""
    return -(-rows // (4 * num_threads()))


@njit(**JIT)
def _scaled(source, target, weight, columns, squares, eps, like, weight_like):
    """A row over the root of its mean square, times the weight; `squares` are the lanes of its sum of squares."""
    mean = horizontal_sum(squares) / np.float32(columns)
    factor = splat(_ONE / math.sqrt(mean + np.float32(eps)))
    for c in range(0, columns, 16):
        left = columns - c
        value = load_some(source + c * size_of(like), left, like) * factor
        value = value * load_some(weight + c * size_of(weight_like), left, weight_like)
        store_some(value, target + c * size_of(like), left, like)


@njit(**JIT)
def _norm_rows(
    like, weight_like, x, stride, residual, residual_stride, out, weight, columns, eps, first, last
):
    size = size_of(like)
    for row in range(first, last):
        source = x + row * stride
        squares = splat(_F32)
        if residual != 0:
            total = residual + row * residual_stride
            for c in range(0, columns, 16):
                left = columns - c
                added = load_some(source + c * size, left, like) + load_some(total + c * size, left, like)
                added = rounded(added, like)
                store_some(added, total + c * size, left, like)
                squares = fma(added, added, squares)
            source = total
        else:
            for c in range(0, columns, 16):
                value = load_some(source + c * size, columns - c, like)
                squares = fma(value, value, squares)
        _scaled(source, out + row * columns * size, weight, columns, squares, eps, like, weight_like)


def _norm_units(taken, arguments, like, weight_like):
    x, stride, residual = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    residual_stride, out = read_int64(arguments + 24), read_int64(arguments + 32)
    weight, columns = read_int64(arguments + 40), read_int64(arguments + 48)
    eps, rows, share = read_float64(arguments + 56), read_int64(arguments + 64), read_int64(arguments + 72)
    while True:
        first = fetch_add(taken, 1) * share
        if first >= rows:
            break
        last = min(first + share, rows)
        _norm_rows(
            like, weight_like, x, stride, residual, residual_stride, out, weight, columns, eps, first, last
        )


_norm_all = Kernel(_norm_units, "qqqqqqqdqq")


@njit(**JIT)
def _activate_rows(like, gate_up, stride, out, columns, is_gelu, first, last):
    size = size_of(like)
    one = splat(_ONE)
    for row in range(first, last):
        gate, target = gate_up + row * stride, out + row * columns * size
        up = gate + columns * size
        for c in range(0, columns, 16):
            left = columns - c
            g = load_some(gate + c * size, left, like)
            inner = g
            if is_gelu != 0:
                # (1 + tanh(z)) / 2 is the logistic function of 2z.
                inner = (fma(g * g * g, splat(0.044715), g)) * splat(2.0 * math.sqrt(2.0 / math.pi))
            # torch rounds the activation before it multiplies.
            value = rounded(g / (one + exp(splat(_F32) - inner)), like)
            value = value * load_some(up + c * size, left, like)
            store_some(value, target + c * size, left, like)


def _activate_units(taken, arguments, like):
    gate_up, stride, out = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    columns, is_gelu = read_int64(arguments + 24), read_int64(arguments + 32)
    rows, share = read_int64(arguments + 40), read_int64(arguments + 48)
    while True:
        first = fetch_add(taken, 1) * share
        if first >= rows:
            break
        _activate_rows(like, gate_up, stride, out, columns, is_gelu, first, min(first + share, rows))


_activate_all = Kernel(_activate_units, "qqqqqqq")


@njit(**JIT)
def _rotate_head(head, dim, cos, sin, half, like):
    size = size_of(like)
    for d in range(0, half, 16):
        left = half - d
        low, high = head + d * size, head + (half + d) * size
        a, b = load_some(low, left, like), load_some(high, left, like)
        c, s = load_some(cos + d * 4, left, _F32), load_some(sin + d * 4, left, _F32)
        store_some(a * c - b * s, low, left, like)
        store_some(b * c + a * s, high, left, like)


@njit(**JIT)
def _rotate_rows(
    like,
    weight_like,
    heads,
    stride,
    num_heads,
    kv_heads,
    dim,
    cos,
    sin,
    half,
    cache,
    slots,
    q_norm,
    k_norm,
    eps,
    first,
    last,
):
    size = size_of(like)
    for row in range(first, last):
        begin = heads + row * stride
        at = row * half * 4
        for number in range(num_heads + kv_heads):
            head = begin + number * dim * size
            if q_norm != 0:
                weight = q_norm if number < num_heads else k_norm
                squares = splat(_F32)
                for d in range(0, dim, 16):
                    value = load_some(head + d * size, dim - d, like)
                    squares = fma(value, value, squares)
                _scaled(head, head, weight, dim, squares, eps, like, weight_like)
            _rotate_head(head, dim, cos + at, sin + at, half, like)
        slot = read_int64(slots + row * 8)
        block = cache + slot // BLOCK * (2 * BLOCK * kv_heads * dim * size)
        for number in range(kv_heads):
            key = begin + (num_heads + number) * dim * size
            value = key + kv_heads * dim * size
            for d in range(dim):
                k, v = _key_value_offsets(number, slot % BLOCK, d, dim, size)
                copy_element(block + k * size, key + d * size, like)
                copy_element(block + v * size, value + d * size, like)


def _rotate_units(taken, arguments, like, weight_like):
    heads, stride, num_heads = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    kv_heads, dim, cos = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    sin, half, cache = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    slots, q_norm, k_norm = read_int64(arguments + 72), read_int64(arguments + 80), read_int64(arguments + 88)
    eps, rows, share = read_float64(arguments + 96), read_int64(arguments + 104), read_int64(arguments + 112)
    while True:
        first = fetch_add(taken, 1) * share
        if first >= rows:
            break
        _rotate_rows(
            like,
            weight_like,
            heads,
            stride,
            num_heads,
            kv_heads,
            dim,
            cos,
            sin,
            half,
            cache,
            slots,
            q_norm,
            k_norm,
            eps,
            first,
            min(first + share, rows),
        )


_rotate = Kernel(_rotate_units, "qqqqqqqqqqqqdqq")
