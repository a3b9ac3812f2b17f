"""The code that kernels in numba are lowered to: vectors of sixteen float32 in LLVM's portable vector IR.

LLVM makes one AVX-512 instruction of an operation on <16 x float>, two of AVX2 or four of NEON, so one source serves
all. Only the product of pairs of bfloat16 is an instruction by name (dpbf16ps), where the processor has it.

Functions here emit instructions at an llvmlite `builder`; addresses are i64 values, in bytes.

`numba.core` is not numba's public part; `numba.extending` has nothing that declares a function in the module that is
being compiled (`cgutils.get_or_insert_function`), nor anything that names the processor.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-subclassing-any

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16
F32 = ir.FloatType()
F16 = ir.HalfType()
F64 = ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(width) for width in (1, 8, 16, 32, 64))
V_F32, V_F16 = ir.VectorType(F32, LANES), ir.VectorType(F16, LANES)
V_I1, V_I8, V_I16, V_I32 = (ir.VectorType(kind, LANES) for kind in (I1, I8, I16, I32))
_MAGIC = 12582912.0
"""1.5·2²³"""


def vector(kind, value):
    """A constant with `value` in each lane."""
    return ir.Constant(kind, [value] * LANES)


def i64(value):
    return ir.Constant(I64, value)


def flag(value):
    return ir.Constant(I1, int(value))


def pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def load(builder, address, kind, align):
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder, value, address, align):
    builder.store(value, pointer(builder, address, value.type), align=align)


def splat(builder, scalar):
    kind = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(V_I32, [0] * LANES))


def call(builder, name, result, arguments, fastmath=()):
    """Call an LLVM intrinsic."""
    kind = ir.FunctionType(result, [value.type for value in arguments])
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, name), arguments, fastmath=fastmath
    )


def fma(builder, a, b, c):
    """a·b + c, rounded once where the processor can."""
    return call(builder, "llvm.fmuladd.v16f32", V_F32, [a, b, c])


def prefetch(builder, address):
    """Have a cache line brought near; what there is no memory at is passed over."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    reading, second_cache, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(function, [pointer(builder, address, I8), reading, second_cache, data])


def keep_loads_behind(builder):
    """No load moves up across this: LLVM would begin with all of an unrolled loop's, and spill."""
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])


def lane_mask(builder, first, last):
    """<16 x i1>: the lanes first ≤ i < last, for i64 values."""
    lanes = ir.Constant(V_I32, list(range(LANES)))
    low, high = (splat(builder, builder.trunc(value, I32)) for value in (first, last))
    return builder.and_(builder.icmp_signed(">=", lanes, low), builder.icmp_signed("<", lanes, high))


def masked_load(builder, address, mask, kind, suffix, align):
    """Zeros where the mask is off; nothing is read there."""
    arguments = [pointer(builder, address, kind), ir.Constant(I32, align), mask, ir.Constant(kind, None)]
    return call(builder, f"llvm.masked.load.{suffix}.p0", kind, arguments)


def masked_store(builder, value, address, mask, suffix, align):
    arguments = [value, pointer(builder, address, value.type), ir.Constant(I32, align), mask]
    call(builder, f"llvm.masked.store.{suffix}.p0", ir.VoidType(), arguments)


def loop(builder, count, step, carried, body):
    """`for i in range(0, count, step)` with values that go from one turn to the next: body(i, values) returns those
    for the next turn. Returns what the last one left."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(i64(0), before)
    values = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        values.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    following = body(index, values)
    index.add_incoming(builder.add(index, i64(step)), builder.block)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def features(context) -> frozenset[str]:
    """LLVM's names of what the processor has that code is made for, less what NUMBA_CPU_FEATURES leaves out."""
    found = context.codegen().magic_tuple()[2].split(",")
    return frozenset(feature[1:] for feature in found if feature.startswith("+"))


def wide_registers(context) -> bool:
    """Whether sixteen float32 are one register, and there are 32 registers."""
    return "avx512f" in features(context)


def has_dpbf16(context) -> bool:
    """Whether there is an instruction for the product of pairs of bfloat16."""
    return wide_registers(context) and "avx512bf16" in features(context)


class Elements:
    """How one dtype lies in memory. A *pair* is two operands of a product's sum: for 16-bit dtypes their elements lie
    side by side, (a₀ b₀ a₁ b₁ …); for float32 and codes they are two vectors. The other factor of a product, which
    `splat_pair` reads, is of the same dtype, beside codes it is float32."""

    size: int
    factor_size: int
    """Bytes of an element of the other factor."""
    column_size = 4
    """Bytes from one column of a pair to the next."""

    def load(self, builder, address, mask=None):
        """[16] as float32; zeros where a mask is given and off."""
        raise NotImplementedError

    def store(self, builder, value, address, mask=None):
        """[16] float32, rounded to nearest even."""
        raise NotImplementedError

    def round(self, builder, value):
        """[16] float32 through this dtype and back."""
        raise NotImplementedError

    def load_pair(self, builder, address, second, mask=None):
        """A pair of vectors: 64 bytes at the address, for float32 and 64 at the address + second; for codes, 16 and
        16."""
        raise NotImplementedError

    def splat_pair(self, builder, address):
        """Two adjacent elements of the other factor, in all lanes."""
        raise NotImplementedError

    def dot_pair(self, builder, total, a, b):
        """total [16] float32 + a₀·b₀ + a₁·b₁ of each lane."""
        raise NotImplementedError


class _Float32(Elements):
    size = factor_size = 4

    def load(self, builder, address, mask=None):
        if mask is None:
            return load(builder, address, V_F32, 4)
        return masked_load(builder, address, mask, V_F32, "v16f32", 4)

    def store(self, builder, value, address, mask=None):
        if mask is None:
            store(builder, value, address, 4)
        else:
            masked_store(builder, value, address, mask, "v16f32", 4)

    def round(self, builder, value):
        return value

    def load_pair(self, builder, address, second, mask=None):
        return self.load(builder, address, mask), self.load(builder, builder.add(address, second), mask)

    def splat_pair(self, builder, address):
        there = builder.add(address, i64(4))
        return tuple(splat(builder, load(builder, at, F32, 4)) for at in (address, there))

    def dot_pair(self, builder, total, a, b):
        return fma(builder, a[1], b[1], fma(builder, a[0], b[0], total))


class _Halves(Elements):
    """The 16-bit dtypes: a pair is [16] i32, the even element in the lower half."""

    size = factor_size = 2

    def to_float32(self, builder, bits):
        """[16] i16 → float32."""
        raise NotImplementedError

    def to_bits(self, builder, value):
        """[16] float32 → i16."""
        raise NotImplementedError

    def load(self, builder, address, mask=None):
        if mask is None:
            bits = load(builder, address, V_I16, 2)
        else:
            bits = masked_load(builder, address, mask, V_I16, "v16i16", 2)
        return self.to_float32(builder, bits)

    def store(self, builder, value, address, mask=None):
        bits = self.to_bits(builder, value)
        if mask is None:
            store(builder, bits, address, 2)
        else:
            masked_store(builder, bits, address, mask, "v16i16", 2)

    def round(self, builder, value):
        return self.to_float32(builder, self.to_bits(builder, value))

    def load_pair(self, builder, address, second, mask=None):
        if mask is None:
            return load(builder, address, V_I32, 4)
        return masked_load(builder, address, mask, V_I32, "v16i32", 4)

    def splat_pair(self, builder, address):
        return splat(builder, load(builder, address, I32, 2))

    def unpack(self, builder, pair):
        low = builder.trunc(pair, V_I16)
        high = builder.trunc(builder.lshr(pair, vector(V_I32, 16)), V_I16)
        return self.to_float32(builder, low), self.to_float32(builder, high)

    def dot_pair(self, builder, total, a, b):
        (a0, a1), (b0, b1) = self.unpack(builder, a), self.unpack(builder, b)
        return fma(builder, a1, b1, fma(builder, a0, b0, total))


class _Float16(_Halves):
    def to_float32(self, builder, bits):
        return builder.fpext(builder.bitcast(bits, V_F16), V_F32)

    def to_bits(self, builder, value):
        return builder.bitcast(builder.fptrunc(value, V_F16), V_I16)


class _BFloat16(_Halves):
    def to_float32(self, builder, bits):
        wide = builder.shl(builder.zext(bits, V_I32), vector(V_I32, 16))
        return builder.bitcast(wide, V_F32)

    def to_bits(self, builder, value):
        bits = builder.bitcast(value, V_I32)
        odd = builder.and_(builder.lshr(bits, vector(V_I32, 16)), vector(V_I32, 1))
        rounded = builder.add(bits, builder.add(odd, vector(V_I32, 0x7FFF)))
        # The addition would carry a NaN's digits into its sign.
        is_nan = builder.fcmp_unordered("uno", value, value)
        quiet = builder.or_(bits, vector(V_I32, 0x400000))
        chosen = builder.select(is_nan, quiet, rounded)
        return builder.trunc(builder.lshr(chosen, vector(V_I32, 16)), V_I16)

    def unpack(self, builder, pair):
        low = builder.shl(pair, vector(V_I32, 16))
        high = builder.and_(pair, vector(V_I32, -65536))
        return builder.bitcast(low, V_F32), builder.bitcast(high, V_F32)


class _Codes(_Float32):
    """Whole numbers -127 … 127 in int8."""

    size = column_size = 1

    def load(self, builder, address, mask=None):
        if mask is None:
            codes = load(builder, address, V_I8, 1)
        else:
            codes = masked_load(builder, address, mask, V_I8, "v16i8", 1)
        return builder.sitofp(builder.sext(codes, V_I32), V_F32)

    def store(self, builder, value, address, mask=None):
        """The nearest codes, ties to even; any code for a NaN."""
        # The low byte of a number beside 1.5·2²³ is the nearest whole number.
        shifted = builder.fadd(self._clamped(builder, value), vector(V_F32, _MAGIC))
        codes = builder.trunc(builder.bitcast(shifted, V_I32), V_I8)
        if mask is None:
            store(builder, codes, address, 1)
        else:
            masked_store(builder, codes, address, mask, "v16i8", 1)

    def round(self, builder, value):
        magic = vector(V_F32, _MAGIC)
        return builder.fsub(builder.fadd(self._clamped(builder, value), magic), magic)

    def _clamped(self, builder, value):
        least, most = vector(V_F32, -127.0), vector(V_F32, 127.0)
        value = builder.select(builder.fcmp_ordered(">", value, least), value, least)
        return builder.select(builder.fcmp_ordered("<", value, most), value, most)


class _NamedBFloat(ir.Type):
    """`bfloat`, which llvmlite has no class for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _NamedBFloat)

    def __hash__(self):
        return hash(_NamedBFloat)


class _BFloat16Pairs(_BFloat16):
    """With dpbf16ps, and with the instruction that rounds (both take subnormal numbers for zeros)."""

    def to_bits(self, builder, value):
        kind = ir.VectorType(_NamedBFloat(), LANES)
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [value])
        return builder.bitcast(rounded, V_I16)

    def dot_pair(self, builder, total, a, b):
        kind = ir.VectorType(_NamedBFloat(), 2 * LANES)
        operands = [builder.bitcast(pair, kind) for pair in (a, b)]
        return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V_F32, [total, *operands])


def elements(context, like) -> Elements:
    """The elements by the numba type of a `like` argument (see `numba_runtime.vectors.LIKE`)."""
    if like == types.float32:
        return _Float32()
    if like == types.int16:
        return _Float16()
    if like == types.int8:
        return _Codes()
    if like == types.uint16:
        return _BFloat16Pairs() if has_dpbf16(context) else _BFloat16()
    raise TypeError(f"{like} does not stand for a dtype of the kernels")
