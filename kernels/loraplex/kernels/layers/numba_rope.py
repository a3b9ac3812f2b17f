"""Rotary position embedding, the norms of queries and keys before it, and the write into the paged KV cache on a CPU,
in one kernel compiled by numba."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.attention.kv_codes import has_whole_blocks, head_width
from loraplex.kernels.attention.numba_attention import NumbaAttentionBatch
from loraplex.kernels.attention.numba_attention_products import BLOCK, is_codes
from loraplex.kernels.layers.numba_kv_write import (
    follows,
    transform_queries,
    write_block,
    write_codes,
    write_row,
)
from loraplex.kernels.layers.numba_norm import scaled
from loraplex.kernels.layers.rope import check_norms
from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, rows_of_unit, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    CODES,
    LIKE,
    fma,
    jit,
    load_some,
    read_float64,
    read_int64,
    size_of,
    splat,
    store_some,
)

_F32 = np.float32(0)


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
    v_norm: torch.Tensor | None = None,
    gated: bool = False,
) -> None:
    """`loraplex.kernels.ops.RotateAndWrite`, into a cache in the order of `loraplex.kernels.attention.numba_attention`.

    The last two axes of `heads` are contiguous, D is even, and `cos` and `sin` are contiguous float32. Raises
    ValueError for other shapes.
    """
    rows, all_heads, dim = heads.shape
    kv_heads, half = cache.shape[3], cos.shape[-1]
    before = num_heads * (1 + gated)
    kinds = (all_heads - before) // kv_heads
    if (
        all_heads != before + kinds * kv_heads
        or kinds not in ((0, 2) if v_norm is None else (0, 1, 2))
        or cache.shape[1:] != (BLOCK, 2, kv_heads, head_width(dim, cache.dtype))
        or cache.dtype not in (heads.dtype, torch.int8)
        or dim % 2
        or 2 * half > dim
        or cos.shape != (rows, 1, half)
        or sin.shape != cos.shape
        or batch.num_rows != rows
        or heads.stride()[1:] != (dim, 1)
        or cos.dtype is not torch.float32
        or sin.dtype is not torch.float32
        or not (has_whole_blocks(cache) and cos.is_contiguous() and sin.is_contiguous())
    ):
        raise ValueError(
            f"heads {list(heads.shape)} {heads.dtype} with cos {list(cos.shape)} do not fit a cache "
            f"{list(cache.shape)} {cache.dtype}, {num_heads} query heads and {batch.num_rows} rows"
        )
    check_norms(q_norm, k_norm, v_norm, dim, kinds)
    given = [weight for weight in (q_norm, k_norm, v_norm) if weight is not None]
    if len({weight.dtype for weight in given}) > 1 or not all(map(torch.Tensor.is_contiguous, given)):
        raise ValueError("the norms of a layer's heads have one dtype, and are contiguous")
    arguments = (
        LIKE[heads.dtype],
        LIKE[given[0].dtype if given else heads.dtype],
        CODES if cache.dtype is torch.int8 else LIKE[heads.dtype],
        heads.data_ptr(),
        heads.stride(0) * heads.element_size(),
        num_heads,
        kv_heads,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        half,
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        batch.slots.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        0 if v_norm is None else v_norm.data_ptr(),
        kinds,
        float(eps),
        1 + gated,
    )
    alone = rows * all_heads * dim <= SMALL
    _rotate.run(arguments[:3], *arguments[3:], rows, rows_of_unit(rows), alone=alone)


@jit
def _norm_heads(head, target, number, dim, weight, eps, like, weight_like, apart=1):
    """`number` heads of a row, each `apart` heads behind the one before."""
    size = size_of(like)
    for _ in range(number):
        squares = splat(_F32)
        for d in range(0, dim, 16):
            value = load_some(head + d * size, dim - d, like)
            squares = fma(value, value, squares)
        scaled(head, target, weight, dim, squares, eps, like, weight_like)
        head += apart * dim * size
        target += apart * dim * size


@jit
def _rotate_heads(heads, number, dim, cos, sin, half, like, apart=1):
    """`number` heads of a row, each `apart` heads behind the one before, in place."""
    size = size_of(like)
    for d in range(0, half, 16):
        left = half - d
        c, s = load_some(cos + d * 4, left, _F32), load_some(sin + d * 4, left, _F32)
        low = heads + d * size
        for _ in range(number):
            high = low + half * size
            a, b = load_some(low, left, like), load_some(high, left, like)
            store_some(a * c - b * s, low, left, like)
            store_some(b * c + a * s, high, left, like)
            low += apart * dim * size


@jit
def _rotate_rows(
    like,
    weight_like,
    of_cache,
    codes,
    numbers,
    heads,
    stride,
    num_heads,
    kv_heads,
    dim,
    cos,
    sin,
    half,
    cache,
    block_bytes,
    slots,
    q_norm,
    k_norm,
    v_norm,
    kinds,
    eps,
    apart,
    copies,
    first,
    last,
):
    size = size_of(like)
    row_bytes = kv_heads * dim * size
    keys = num_heads * apart * dim * size
    values, value_row = keys + row_bytes, stride
    if kinds == 1:
        value_row = row_bytes
    run = 0  # rows up to this one whose positions lie side by side in one block
    for row in range(first, last):
        begin = heads + row * stride
        value = begin + values
        if kinds == 1:
            value = copies + run * row_bytes
            _norm_heads(begin + keys, value, kv_heads, dim, v_norm, eps, like, weight_like)
        elif kinds == 2 and v_norm != 0:
            _norm_heads(value, value, kv_heads, dim, v_norm, eps, like, weight_like)
        if q_norm != 0:
            _norm_heads(begin, begin, num_heads, dim, q_norm, eps, like, weight_like, apart)
            if kinds != 0:
                _norm_heads(begin + keys, begin + keys, kv_heads, dim, k_norm, eps, like, weight_like)
        at = row * half * 4
        if apart == 1 and kinds != 0:
            _rotate_heads(begin, num_heads + kv_heads, dim, cos + at, sin + at, half, like)
        else:
            _rotate_heads(begin, num_heads, dim, cos + at, sin + at, half, like, apart)
            if kinds != 0:
                _rotate_heads(begin + keys, kv_heads, dim, cos + at, sin + at, half, like)
        if is_codes(of_cache):
            transform_queries(begin, num_heads, dim, numbers, like, apart)
        if kinds == 0:
            continue
        run += 1
        if row + 1 < last and follows(slots, row + 1):
            continue
        slot = read_int64(slots + row * 8)
        block = cache + slot // BLOCK * block_bytes
        if is_codes(of_cache):
            for back in range(run):
                key, own = begin + keys - back * stride, value - back * value_row
                write_codes(block, slot % BLOCK - back, key, own, kv_heads, dim, codes, numbers, like)
        elif run == BLOCK:
            key, own = begin + keys - (BLOCK - 1) * stride, value - (BLOCK - 1) * value_row
            write_block(block, key, own, stride, value_row, kv_heads, dim, like)
        else:
            for back in range(run):
                key, own = begin + keys - back * stride, value - back * value_row
                write_row(block, slot % BLOCK - back, key, own, kv_heads, dim, like)
        run = 0


def _rotate_units(team, arguments, like, weight_like, of_cache):
    heads, stride, num_heads = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    kv_heads, dim, cos = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    sin, half, cache = read_int64(arguments + 48), read_int64(arguments + 56), read_int64(arguments + 64)
    block_bytes, slots, q_norm = (
        read_int64(arguments + 72),
        read_int64(arguments + 80),
        read_int64(arguments + 88),
    )
    k_norm, v_norm, kinds = (
        read_int64(arguments + 96),
        read_int64(arguments + 104),
        read_int64(arguments + 112),
    )
    eps, apart = read_float64(arguments + 120), read_int64(arguments + 128)
    rows, share = read_int64(arguments + 136), read_int64(arguments + 144)
    units = (rows + share - 1) // share
    codes, numbers = np.empty(dim, np.int8), np.empty(dim, np.float32)
    # Of keys that are values too: those of a run of rows.
    copies = np.empty(BLOCK * kv_heads * dim * size_of(like) if kinds == 1 else 1, np.int8)
    while True:
        first = take_unit(team, units) * share
        if first >= rows:
            break
        last = min(first + share, rows)
        # A block's rows belong to the unit that has the first of them.
        while first < last and follows(slots, first):
            first += 1
        while first < last < rows and follows(slots, last):
            last += 1
        _rotate_rows(
            like,
            weight_like,
            of_cache,
            codes.ctypes.data,
            numbers.ctypes.data,
            heads,
            stride,
            num_heads,
            kv_heads,
            dim,
            cos,
            sin,
            half,
            cache,
            block_bytes,
            slots,
            q_norm,
            k_norm,
            v_norm,
            kinds,
            eps,
            apart,
            copies.ctypes.data,
            first,
            last,
        )


_rotate = Kernel(_rotate_units, "qqqqqqqqqqqqqqqdqqq")
