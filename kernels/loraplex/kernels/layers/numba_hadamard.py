"""The Hadamard transform of a head on a CPU, compiled by numba."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.vectors import float32x16, jit, load, size_of, splat, store

_F32 = np.float32(0)


@jit
def hadamard(source, numbers, dim, factor, like):
    """`loraplex.kernels.attention.kv_codes.hadamard` of `factor` times one head [D], D a power of two from 16 on.
    Addresses; `numbers`: of [D] float32, for the result."""
    half, size = 16, size_of(like)
    if dim == half:
        store(_within(load(source, like) * splat(factor)), numbers, _F32)
    else:
        for d in range(0, dim, 32):
            a = _within(load(source + d * size, like) * splat(factor))
            b = _within(load(source + (d + 16) * size, like) * splat(factor))
            store(a + b, numbers + d * 4, _F32)
            store(a - b, numbers + (d + 16) * 4, _F32)
        half = 32
    while half < dim:
        for first in range(0, dim, 2 * half):
            for d in range(first, first + half, 16):
                low, high = numbers + d * 4, numbers + (d + half) * 4
                a, b = load(low, _F32), load(high, _F32)
                store(a + b, low, _F32)
                store(a - b, high, _F32)
        half *= 2


@intrinsic
def _within(typing, x):
    """The butterflies of a vector's sixteen numbers among each other."""

    def lower(context, builder, signature, values):
        (x,) = values
        for half in (1, 2, 4, 8):
            lanes = range(nir.LANES)
            others = ir.Constant(nir.V_I32, [lane ^ half for lane in lanes])
            signs = ir.Constant(nir.V_F32, [-1.0 if lane & half else 1.0 for lane in lanes])
            x = nir.fma(builder, x, signs, builder.shuffle_vector(x, x, others))
        return x

    return float32x16(float32x16), lower
