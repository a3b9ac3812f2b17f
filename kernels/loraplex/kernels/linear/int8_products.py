"""Products of codes of weights, of 4 or 8 bits, with 8-bit codes of activations, as whole numbers, in LLVM's IR.

A *part* of a block is sixteen outputs. A step is four inputs, a group 32: eight steps. A part has 64 bytes for a step,
the four of each output side by side, from 0 to 255; of codes of 4 bits, from 0 to 15, it has them for two steps: low
halves are the codes of the first, high halves those of the second.

The sums are exact, so each kind of processor has the same ones:

* AVX2's `pmaddubsw` adds two products in 16 bits, and saturates. Two products of 4-bit codes are at most 2·15·128 =
  3,840 in magnitude, and the eight such sums of a group 30,720 < 2¹⁵. So they are added in 16 bits, and `pmaddwd`
  brings them to 32 bits once a group. Of 8-bit codes the low and the high halves are summed apart, and it multiplies
  these sums by 1 and by 16.
* AVX512-VNNI's `vpdpbusd` adds four products in 32 bits, and does not saturate.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs

from __future__ import annotations

from typing import Protocol

from llvmlite import ir

from loraplex.kernels.numba_runtime import ir as nir

STEP = 4
"""Inputs of a step."""
STEPS = 8
"""Steps of a group."""
PART_BYTES = 64
"""Bytes of a part that lie side by side: of one step, or of two of 4-bit codes."""
_V32_I8 = ir.VectorType(nir.I8, 32)
_V16_I16 = ir.VectorType(nir.I16, 16)
_V8_I32 = ir.VectorType(nir.I32, 8)


class Products(Protocol):
    """One kind of processor's."""

    most_rows: int
    """Most rows of a tile: the sums of more would leave the registers."""

    def group(self, builder, inputs, place, stride):
        """[16] int32 sums of one group, for each of the rows: of the codes of a part at `place`, whose 64 bytes lie
        `stride` bytes apart, times the activations at the addresses `inputs`."""
        ...


def products(features: frozenset[str], bits: int) -> Products:
    """The fastest of codes of 4 or 8 bits, for a processor by LLVM's names of its features."""
    if {"avx512f", "avx512vnni"} <= features:
        return _Vnni(bits)
    if "avx2" in features:
        return _Avx2() if bits == 4 else _Avx2Bytes()
    return _Portable(bits)


def _as_it_is(builder, value):
    """The value, and no later load before it: LLVM would begin with all the loads of a group, and spill them."""
    kind = ir.FunctionType(value.type, [value.type])
    return builder.call(ir.InlineAsm(kind, "", "=x,0,~{memory}", side_effect=True), [value])


def _word(builder, address, step):
    """The four activations of a step, in each of sixteen lanes."""
    at = builder.add(address, nir.i64(STEP * step))
    return nir.splat(builder, nir.load(builder, at, nir.I32, 4))


def _both_halves(builder, packed, kind):
    """The low and the high 4 bits of each byte of `packed`, of `kind`: words of 32 bits."""
    mask, shift = (ir.Constant(kind, [number] * kind.count) for number in (0x0F0F0F0F, 4))
    return builder.and_(packed, mask), builder.and_(builder.lshr(packed, shift), mask)


class _Words:
    """Sums by `dot` of a step."""

    most_rows = 4

    def __init__(self, bits: int) -> None:
        self._in_halves = bits == 4

    def dot(self, builder, total, codes, given):
        """total [16] int32 + Σ of four codes times four activations, which are the bytes of [16] int32."""
        raise NotImplementedError

    def group(self, builder, inputs, place, stride):
        totals = [nir.vector(nir.V_I32, 0)] * len(inputs)
        held = 2 if self._in_halves else 1
        for index in range(STEPS // held):
            at = builder.add(place, builder.mul(stride, nir.i64(index)))
            packed = nir.load(builder, at, nir.V_I32, 4)
            columns = _both_halves(builder, packed, nir.V_I32) if self._in_halves else (packed,)
            for number, column in enumerate(columns):
                totals = [
                    self.dot(builder, total, column, _word(builder, row, held * index + number))
                    for total, row in zip(totals, inputs, strict=True)
                ]
        return totals


class _Portable(_Words):
    def dot(self, builder, total, codes, given):
        for byte in range(STEP):
            code = builder.lshr(codes, nir.vector(nir.V_I32, 8 * byte))
            code = builder.and_(code, nir.vector(nir.V_I32, 255))
            value = builder.shl(given, nir.vector(nir.V_I32, 24 - 8 * byte))
            value = builder.ashr(value, nir.vector(nir.V_I32, 24))
            total = builder.add(total, builder.mul(code, value))
        return total


class _Vnni(_Words):
    most_rows = 12

    def dot(self, builder, total, codes, given):
        return nir.call(builder, "llvm.x86.avx512.vpdpbusd.512", nir.V_I32, [total, codes, given])


class _Avx2:
    most_rows = 4

    def group(self, builder, inputs, place, stride):
        # Of the first eight outputs for each row, and of the last eight.
        sums = [[ir.Constant(_V16_I16, [0] * 16)] * len(inputs) for _ in range(2)]
        for index in range(STEPS // 2):
            at = builder.add(place, builder.mul(stride, nir.i64(index)))
            halves = [self._codes(builder, builder.add(at, nir.i64(start))) for start in (0, 32)]
            for number in range(2):
                for r, row in enumerate(inputs):
                    given = self._given(builder, row, 2 * index + number)
                    for half in range(2):
                        added = self._add_pairs(builder, halves[half][number], given)
                        sums[half][r] = _as_it_is(builder, builder.add(sums[half][r], added))
        widened = [[self._widen(builder, each, 1) for each in rows] for rows in sums]
        return self._joined(builder, widened)

    def _codes(self, builder, place):
        return _both_halves(builder, nir.load(builder, place, _V8_I32, 4), _V8_I32)

    def _given(self, builder, row, step):
        word, undefined = _word(builder, row, step), ir.Constant(nir.V_I32, ir.Undefined)
        return builder.shuffle_vector(word, undefined, ir.Constant(_V8_I32, [0] * 8))

    def _add_pairs(self, builder, codes, given):
        operands = [builder.bitcast(each, _V32_I8) for each in (codes, given)]
        return nir.call(builder, "llvm.x86.avx2.pmadd.ub.sw", _V16_I16, operands)

    def _widen(self, builder, sums, factor):
        """[8] int32: sums of pairs, times a factor."""
        factors = ir.Constant(_V16_I16, [factor] * 16)
        return nir.call(builder, "llvm.x86.avx2.pmadd.wd", _V8_I32, [sums, factors])

    def _joined(self, builder, sums):
        """[16] for each row, of those of the first and of the last eight outputs."""
        lanes = ir.Constant(nir.V_I32, list(range(16)))
        return [builder.shuffle_vector(first, last, lanes) for first, last in zip(*sums, strict=True)]


class _Avx2Bytes(_Avx2):
    def group(self, builder, inputs, place, stride):
        # Eight outputs at a time: two sums for each row leave registers for the codes.
        halves = [builder.add(place, nir.i64(start)) for start in (0, 32)]
        return self._joined(builder, [self._eight(builder, inputs, at, stride) for at in halves])

    def _eight(self, builder, inputs, place, stride):
        """[8] int32 sums of eight outputs for each row."""
        # Of the low halves of codes, and of the high ones.
        sums = [[ir.Constant(_V16_I16, [0] * 16)] * len(inputs) for _ in range(2)]
        for step in range(STEPS):
            halves = self._codes(builder, builder.add(place, builder.mul(stride, nir.i64(step))))
            for r, row in enumerate(inputs):
                given = self._given(builder, row, step)
                for number, codes in enumerate(halves):
                    added = self._add_pairs(builder, codes, given)
                    sums[number][r] = _as_it_is(builder, builder.add(sums[number][r], added))
        return [
            builder.add(self._widen(builder, low, 1), self._widen(builder, high, 16))
            for low, high in zip(*sums, strict=True)
        ]
