"""A vector of sixteen float32 as a type of numba's, for kernels over memory that is given by address.

In a compiled function, `load`, `store` and the rest work on it as on a number, and `+ - * /` are by lane. Addresses are
int64, in bytes. An element's dtype is given by a `like` argument, a value of `LIKE[dtype]`: numba compiles a kernel
once for each.

Nothing here assumes that numbers are finite: a NaN goes where arithmetic takes it.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs, allow-subclassing-any

from __future__ import annotations

import operator
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target  # private: nothing public names the processor or its features
from numba.extending import intrinsic, models, overload, register_model

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.cache import KERNELS

LIKE = {torch.bfloat16: np.uint16(0), torch.float16: np.int16(0), torch.float32: np.float32(0)}
"""The argument that stands for a dtype. numba has no 16-bit floats: uint16 stands for bfloat16, int16 for float16."""

CODES = np.int8(0)
"""The argument that stands for codes of 8 bits (`loraplex.kernels.attention.kv_codes`)."""

JIT = {"boundscheck": False, "error_model": "numpy"}
"""Options of every compiled function. Without fastmath: it would be free to take NaN for impossible."""


def jit(function):
    """Compiled for the types that it is called with, at the first call, and kept in the cache."""
    return KERNELS.cache_function(njit(nogil=True, **JIT)(function))


@cache
def host_features() -> frozenset[str]:
    """`numba_runtime.ir.features` of what is compiled here."""
    return nir.features(cpu_target.target_context)


def host_name() -> str:
    """LLVM's name of the processor."""
    return str(cpu_target.target_context.codegen().magic_tuple()[1])


class Float32x16(types.Type):
    """Sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


float32x16 = Float32x16()


@register_model(Float32x16)
class _Float32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, nir.V_F32)


def _vector_intrinsic(result, arity, emit):
    """An intrinsic of `arity` vectors; emit(builder, *vectors)."""
    arguments = (float32x16,) * arity

    def lower(context, builder, signature, values):
        return emit(builder, *values)

    if arity == 1:

        @intrinsic
        def made(typing, a):
            return (result(*arguments), lower) if a is float32x16 else None

    elif arity == 2:

        @intrinsic
        def made(typing, a, b):
            return (result(*arguments), lower) if a is float32x16 and b is float32x16 else None

    else:

        @intrinsic
        def made(typing, a, b, c):
            return result(*arguments), lower

    return made


def _reassociated(name, start):
    def emit(builder, a):
        leading = [] if start is None else [ir.Constant(nir.F32, start)]
        return nir.call(builder, name, nir.F32, [*leading, a], fastmath=("reassoc",))

    return emit


def _maximum(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _at_least(builder, a, b):
    return builder.select(builder.fcmp_ordered(">=", a, b), a, nir.vector(nir.V_F32, 0.0))


fma = _vector_intrinsic(float32x16, 3, nir.fma)
"""a·b + c"""
maximum = _vector_intrinsic(float32x16, 2, _maximum)
"""Maximum by lane; b where one is NaN."""
at_least = _vector_intrinsic(float32x16, 2, _at_least)
"""Select by lane: a where it is b or more, else 0."""
horizontal_sum = _vector_intrinsic(types.float32, 1, _reassociated("llvm.vector.reduce.fadd.v16f32", -0.0))
horizontal_max = _vector_intrinsic(types.float32, 1, _reassociated("llvm.vector.reduce.fmax.v16f32", None))
"""Maximum of the lanes that are not NaN."""
first_lane = _vector_intrinsic(
    types.float32, 1, lambda builder, a: builder.extract_element(a, ir.Constant(nir.I32, 0))
)
_add = _vector_intrinsic(float32x16, 2, lambda builder, a, b: builder.fadd(a, b))
_sub = _vector_intrinsic(float32x16, 2, lambda builder, a, b: builder.fsub(a, b))
_mul = _vector_intrinsic(float32x16, 2, lambda builder, a, b: builder.fmul(a, b))
_div = _vector_intrinsic(float32x16, 2, lambda builder, a, b: builder.fdiv(a, b))


def _by_lane(operation, made):
    @overload(operation)
    def typed(a, b):
        if a is float32x16 and b is float32x16:
            return lambda a, b: made(a, b)
        return None


_by_lane(operator.add, _add)
_by_lane(operator.sub, _sub)
_by_lane(operator.mul, _mul)
_by_lane(operator.truediv, _div)


@intrinsic
def splat(typing, number):
    """The number, as float32, in all lanes."""

    def lower(context, builder, signature, values):
        return nir.splat(builder, context.cast(builder, values[0], signature.args[0], types.float32))

    return float32x16(number), lower


@intrinsic
def load(typing, address, like):
    """Sixteen elements."""

    def lower(context, builder, signature, values):
        return nir.elements(context, signature.args[1]).load(builder, values[0])

    return float32x16(types.int64, like), lower


@intrinsic
def load_first(typing, address, count, like):
    """`count` < 16 elements, zeros behind them; no more is read."""

    def lower(context, builder, signature, values):
        mask = nir.lane_mask(builder, nir.i64(0), values[1])
        return nir.elements(context, signature.args[2]).load(builder, values[0], mask)

    return float32x16(types.int64, types.int64, like), lower


@intrinsic
def store(typing, value, address, like):
    """Sixteen elements, each rounded to the nearest, ties to even."""

    def lower(context, builder, signature, values):
        nir.elements(context, signature.args[2]).store(builder, *values[:2])
        return context.get_dummy_value()

    return types.void(float32x16, types.int64, like), lower


@intrinsic
def store_first(typing, value, address, count, like):
    """`count` < 16 elements; no more is written."""

    def lower(context, builder, signature, values):
        mask = nir.lane_mask(builder, nir.i64(0), values[2])
        nir.elements(context, signature.args[3]).store(builder, values[0], values[1], mask)
        return context.get_dummy_value()

    return types.void(float32x16, types.int64, types.int64, like), lower


@jit
def load_some(address, count, like):
    """min(count, 16) elements, zeros behind them."""
    if count >= 16:
        return load(address, like)
    return load_first(address, count, like)


@jit
def store_some(value, address, count, like):
    """min(count, 16) elements."""
    if count >= 16:
        store(value, address, like)
    else:
        store_first(value, address, count, like)


@intrinsic
def rounded(typing, value, like):
    """The vector after a `store` and a `load`."""

    def lower(context, builder, signature, values):
        return nir.elements(context, signature.args[1]).round(builder, values[0])

    return float32x16(float32x16, like), lower


@intrinsic
def keep_lanes(typing, value, first, last, other):
    """The lanes first ≤ i < last, and `other` elsewhere."""

    def lower(context, builder, signature, values):
        mask = nir.lane_mask(builder, values[1], values[2])
        return builder.select(mask, values[0], nir.splat(builder, values[3]))

    return float32x16(float32x16, types.int64, types.int64, types.float32), lower


@intrinsic
def size_of(typing, like):
    """Bytes of an element."""

    def lower(context, builder, signature, values):
        return nir.i64(nir.elements(context, signature.args[0]).size)

    return types.int64(like), lower


@intrinsic
def copy_element(typing, target, source, like):
    """One element from address to address, bit by bit."""

    def lower(context, builder, signature, values):
        size = nir.elements(context, signature.args[2]).size
        kind = ir.IntType(8 * size)
        nir.store(builder, nir.load(builder, values[1], kind, size), values[0], size)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, like), lower


def _reading(kind, result):
    """An intrinsic: the number at an address that is a multiple of its size; whole numbers are int64 then."""
    size = 8 if kind in (nir.I64, nir.F64) else 4

    @intrinsic
    def read(typing, address):
        def lower(context, builder, signature, values):
            number = nir.load(builder, values[0], kind, size)
            return builder.sext(number, nir.I64) if kind is nir.I32 else number

        return result(types.int64), lower

    return read


read_int64, read_int32 = _reading(nir.I64, types.int64), _reading(nir.I32, types.int64)
read_float64, read_float32 = _reading(nir.F64, types.float64), _reading(nir.F32, types.float32)


@intrinsic
def write_float32(typing, value, address):
    def lower(context, builder, signature, values):
        nir.store(builder, values[0], values[1], 4)
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), lower


@intrinsic
def write_float64(typing, value, address):
    def lower(context, builder, signature, values):
        nir.store(builder, values[0], values[1], 8)
        return context.get_dummy_value()

    return types.void(types.float64, types.int64), lower


@intrinsic
def write_int64(typing, value, address):
    def lower(context, builder, signature, values):
        nir.store(builder, values[0], values[1], 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), lower


@intrinsic
def fetch_add(typing, address, amount):
    """Add to an int64 that threads share, and return what it was. A thread that reads the sum sees all writes before
    this call."""

    def lower(context, builder, signature, values):
        place = nir.pointer(builder, values[0], nir.I64)
        return builder.atomic_rmw("add", place, values[1], ordering="seq_cst")

    return types.int64(types.int64, types.int64), lower


def _exp(builder, x):
    """exp with Cephes' polynomial (Moshier): within 2 units in the last place; 0 below -87.3, inf above 88.3."""

    def constant(value):
        return nir.vector(nir.V_F32, value)

    # Adding 1.5·2²³ leaves the nearest whole number in the low digits. No conversion to whole numbers, which NaN
    # has not got.
    magic = constant(12582912.0)
    shifted = nir.fma(builder, x, constant(float(np.float32(1.4426950408889634))), magic)
    n = builder.fsub(shifted, magic)
    r = nir.fma(builder, n, constant(-0.693359375), x)
    r = nir.fma(builder, n, constant(float(np.float32(2.12194440e-4))), r)
    p = constant(float(np.float32(1.9875691500e-4)))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = nir.fma(builder, p, r, constant(float(np.float32(c))))
    p = builder.fadd(nir.fma(builder, p, builder.fmul(r, r), r), constant(1.0))
    power = builder.shl(builder.bitcast(shifted, nir.V_I32), nir.vector(nir.V_I32, 23))
    power = builder.add(power, nir.vector(nir.V_I32, 127 << 23))
    result = builder.fmul(p, builder.bitcast(power, nir.V_F32))
    low, high = float(np.float32(-87.3)), float(np.float32(88.3))
    result = builder.select(builder.fcmp_ordered("<", x, constant(low)), constant(0.0), result)
    return builder.select(builder.fcmp_ordered(">", x, constant(high)), constant(float("inf")), result)


def _tanh(builder, x):
    """Cephes' polynomial near 0 (Moshier), 1 - 2 / (exp(2x) + 1) elsewhere."""

    def constant(value):
        return nir.vector(nir.V_F32, float(np.float32(value)))

    z = builder.fmul(x, x)
    p = constant(-5.70498872745e-3)
    for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = nir.fma(builder, p, z, constant(c))
    small = nir.fma(builder, builder.fmul(p, z), x, x)
    up = builder.fadd(_exp(builder, builder.fadd(x, x)), constant(1.0))
    large = builder.fsub(constant(1.0), builder.fdiv(constant(2.0), up))
    return builder.select(builder.fcmp_ordered("<", z, constant(0.390625)), small, large)


def _exp2(builder, x):
    """2^x, x ≤ 0, with a polynomial of degree 5: within 4 units in the last place; 0 below -126.5, or the subnormal
    number."""

    def constant(value):
        return nir.vector(nir.V_F32, value)

    def polynomial(r):
        p = constant(1.3276471e-3)
        for c in (9.675541e-3, 5.550713e-2, 2.402212e-1, 6.9314694e-1, 1.0):
            p = nir.fma(builder, p, r, constant(c))
        return p

    if "avx512dq" in host_features():
        # What is left of the nearest whole number, and the product with a power of two, are an instruction each.
        r = _masked(builder, "reduce", x, ir.Constant(nir.I32, 8))
        return _masked(builder, "scalef", polynomial(r), builder.fsub(x, r))
    least = constant(-127.0)
    x = builder.select(builder.fcmp_ordered("<", x, least), least, x)  # a NaN stays
    magic = constant(12582912.0)  # as in `_exp`
    shifted = builder.fadd(x, magic)
    r = builder.fsub(x, builder.fsub(shifted, magic))
    power = builder.shl(builder.bitcast(shifted, nir.V_I32), nir.vector(nir.V_I32, 23))
    power = builder.add(power, nir.vector(nir.V_I32, 127 << 23))
    return builder.fmul(polynomial(r), builder.bitcast(power, nir.V_F32))


def _masked(builder, name, a, b):
    """An AVX-512 instruction on all lanes, in the current rounding mode."""
    everything, current = ir.Constant(nir.I16, -1), ir.Constant(nir.I32, 4)
    arguments = [a, b, nir.vector(nir.V_F32, 0.0), everything, current]
    return nir.call(builder, f"llvm.x86.avx512.mask.{name}.ps.512", nir.V_F32, arguments)


exp = _vector_intrinsic(float32x16, 1, _exp)
exp2 = _vector_intrinsic(float32x16, 1, _exp2)
tanh = _vector_intrinsic(float32x16, 1, _tanh)
