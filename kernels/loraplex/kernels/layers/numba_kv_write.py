"""The write of keys and values into the paged KV cache on a CPU, compiled by numba.

The cache's order (`loraplex.kernels.attention.numba_attention.key_value_offsets`) has positions side by side: a block's
keys are a transpose of the rows they come from, its values pairs of rows, interleaved. A block whose positions are all
written at once is written by vectors; a single row, as in decoding, number by number. Codes are made of each row by
itself.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.attention.kv_codes import (
    LARGEST_CODE,
    LARGEST_SCALE,
    is_transformed,
    transform_factors,
)
from loraplex.kernels.attention.numba_attention import key_value_offsets, scale_offsets
from loraplex.kernels.attention.numba_attention_products import BLOCK
from loraplex.kernels.layers.numba_hadamard import hadamard
from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import (
    CODES,
    copy_element,
    first_lane,
    fma,
    horizontal_max,
    horizontal_sum,
    jit,
    load,
    load_first,
    load_some,
    maximum,
    read_int64,
    size_of,
    splat,
    store,
    store_first,
    store_some,
)

_F32, _F16 = np.float32(0), np.int16(0)
_ONE, _SHARE = np.float32(1), np.float32(1 / LARGEST_CODE)
_LARGEST_SCALE = np.float32(LARGEST_SCALE)
_key_value_offsets, _scale_offsets = jit(key_value_offsets), jit(scale_offsets)
_is_transformed, _transform_factors = jit(is_transformed), jit(transform_factors)


@jit
def follows(slots, row):
    """Whether a row's position is the next one after that of the row before, in the same block. slots: address of
    [T] int64."""
    if row == 0:
        return False
    slot = read_int64(slots + row * 8)
    return slot % BLOCK != 0 and slot == read_int64(slots + row * 8 - 8) + 1


@jit
def write_row(block, position, key, value, kv_heads, dim, like):
    """One row's keys and values, [Hkv, D] each, into a block at `position`. All addresses."""
    for head in range(kv_heads):
        source = head * dim * size_of(like)
        _write_elements(block, head, position, key + source, value + source, 0, 0, dim, like)


@jit
def transform_queries(queries, number, dim, numbers, like, apart):
    """`loraplex.kernels.attention.kv_codes.transform_queries` of `number` heads, each `apart` heads behind the one
    before, in place. `numbers`: address of memory for [D] float32."""
    if _is_transformed(dim):
        factor, _ = _transform_factors(dim)
        for head in range(number):
            query = queries + head * apart * dim * size_of(like)
            hadamard(query, numbers, dim, factor, like)
            for d in range(0, dim, 16):
                store(load(numbers + d * 4, _F32), query + d * size_of(like), like)


@jit
def write_codes(block, position, key, value, kv_heads, dim, codes, numbers, like):
    """`write_row` of a cache of codes. `codes`: address of memory for a head's; `numbers`: of [D] float32."""
    _, factor = _transform_factors(dim)
    for head in range(kv_heads):
        source = head * dim * size_of(like)
        of_key, of_value = _scale_offsets(head, position, dim)
        if _is_transformed(dim):
            hadamard(key + source, numbers, dim, factor, like)
            _make_codes(numbers, dim, codes, block + of_key, _F32)
        else:
            _make_codes(key + source, dim, codes, block + of_key, like)
        for d in range(dim):
            k, _ = _key_value_offsets(head, position, d, dim, 1)
            copy_element(block + k, codes + d, CODES)
        _, v = _key_value_offsets(head, position, 0, dim, 1)
        _make_codes(value + source, dim, block + v, block + of_value, like)


@jit
def _make_codes(source, dim, codes, scale, like):
    """`loraplex.kernels.attention.kv_codes.to_codes` of one head [D]. All addresses."""
    size = size_of(like)
    zero = splat(_F32)
    highest, spoilt = zero, zero
    for d in range(0, dim, 16):
        x = load_some(source + d * size, dim - d, like)
        highest = maximum(maximum(x, zero - x), highest)
        spoilt = fma(x, zero, spoilt)  # NaN where a number is not finite
    largest = min(horizontal_max(highest) * _SHARE, _LARGEST_SCALE) + horizontal_sum(spoilt)
    store_first(splat(largest), scale, 1, _F16)
    own = first_lane(load_first(scale, 1, _F16))
    inverse = splat(_ONE / own if own > _F32 else _F32)
    for d in range(0, dim, 16):
        store_some(load_some(source + d * size, dim - d, like) * inverse, codes + d, dim - d, CODES)


@jit
def write_block(block, key, value, key_row, value_row, kv_heads, dim, like):
    """All positions of a block. `key` and `value` are addresses of the first of BLOCK rows, `key_row` and `value_row`
    bytes apart."""
    size = size_of(like)
    words = dim * size // 4
    whole_keys, whole_values = words // 16 * 16 * 4 // size, dim // 16 * 16
    for head in range(kv_heads):
        source = head * dim * size
        target = block + 2 * BLOCK * source
        for word in range(0, words - 15, 16):
            _transpose(key + source + word * 4, key_row, target + word * BLOCK * 4)
        target += BLOCK * dim * size
        if size == 4:
            for position in range(BLOCK):
                for d in range(0, whole_values, 16):
                    x = load(value + source + position * value_row + d * size, like)
                    store(x, target + (position * dim + d) * size, like)
        else:
            for position in range(0, BLOCK, 2):
                for d in range(0, whole_values, 16):
                    first = value + source + position * value_row + d * size
                    _interleave(first, first + value_row, target + (position * dim + 2 * d) * size)
        for position in range(BLOCK):
            own_key, own_value = key + source + position * key_row, value + source + position * value_row
            _write_elements(block, head, position, own_key, own_value, whole_keys, whole_values, dim, like)


@jit
def _write_elements(block, head, position, key, value, first_key, first_value, dim, like):
    """One head of a row [D], from the dimensions `first_key` and `first_value` on."""
    size = size_of(like)
    for d in range(first_key, dim):
        k, _ = _key_value_offsets(head, position, d, dim, size)
        copy_element(block + k * size, key + d * size, like)
    for d in range(first_value, dim):
        _, v = _key_value_offsets(head, position, d, dim, size)
        copy_element(block + v * size, value + d * size, like)


@intrinsic
def _transpose(typing, source, stride, target):
    """16 rows of 16 words of 32 bits, `stride` bytes apart, into the 16 adjacent rows of their transpose."""

    def lower(context, builder, signature, values):
        source, stride, target = values
        rows = [
            nir.load(builder, builder.add(source, builder.mul(stride, nir.i64(row))), nir.V_I32, 2)
            for row in range(nir.LANES)
        ]
        distance = nir.LANES // 2
        while distance:
            # The corners off the diagonal of each square of 2·distance change places.
            upper = [
                lane if not lane & distance else nir.LANES + lane - distance for lane in range(nir.LANES)
            ]
            lower = [
                lane + distance if not lane & distance else nir.LANES + lane for lane in range(nir.LANES)
            ]
            for row in range(nir.LANES):
                if not row & distance:
                    a, b = rows[row], rows[row | distance]
                    rows[row] = builder.shuffle_vector(a, b, ir.Constant(nir.V_I32, upper))
                    rows[row | distance] = builder.shuffle_vector(a, b, ir.Constant(nir.V_I32, lower))
            distance //= 2
        for row, value in enumerate(rows):
            nir.store(builder, value, builder.add(target, nir.i64(row * 64)), 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower


@intrinsic
def _interleave(typing, first, second, target):
    """Two rows of 16 elements of 16 bits, as (a₀ b₀ a₁ b₁ …)."""

    def lower(context, builder, signature, values):
        first, second, target = values
        low, high = (builder.zext(nir.load(builder, row, nir.V_I16, 2), nir.V_I32) for row in (first, second))
        pairs = builder.or_(low, builder.shl(high, nir.vector(nir.V_I32, 16)))
        nir.store(builder, pairs, target, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), lower
