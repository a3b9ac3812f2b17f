"""Products of 4-bit codes of weights with 8-bit codes of activations, as whole numbers, in LLVM's IR.

A *part* of a block is sixteen outputs. A step is four inputs, a group 32: eight steps. For two steps a part has 64
bytes, the four of each output side by side: their low halves are the codes of the first step, from 0 to 15, their high
halves those of the second.

The sums are exact, so each kind of processor has the same ones:

* AVX2's `pmaddubsw` adds two products in 16 bits, and saturates. Two products are at most 2·15·128 = 3,840 in
  magnitude, and the eight such sums of a group 30,720 < 2¹⁵. So they are added in 16 bits, and `pmaddwd` brings them to
  32 bits once a group.
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
"""Bytes of a part for two steps."""
_V32_I8 = ir.VectorType(nir.I8, 32)
_V16_I16 = ir.VectorType(nir.I16, 16)
_V8_I32 = ir.VectorType(nir.I32, 8)


class Products(Protocol):
    """One kind of processor's."""

    most_rows: int
    """Most rows of a tile: the sums of more would leave the registers."""

    def group(self, builder, inputs, place, stride):
        """[16] int32 sums of one group, for each of the rows: of the codes of a part at `place`, whose pairs of steps
        lie `stride` bytes apart, times the activations at the addresses `inputs`."""
        ...


def products(features: frozenset[str]) -> Products:
    """The fastest for a processor by LLVM's names of its features."""
    if {"avx512f", "avx512vnni"} <= features:
        return _Vnni()
    if "avx2" in features:
        return _Avx2()
    return _Portable()


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

    def dot(self, builder, total, codes, given):
        """total [16] int32 + Σ of four codes times four activations, which are the bytes of [16] int32."""
        raise NotImplementedError

    def group(self, builder, inputs, place, stride):
        totals = [nir.vector(nir.V_I32, 0)] * len(inputs)
        for index in range(STEPS // 2):
            at = builder.add(place, builder.mul(stride, nir.i64(index)))
            packed = nir.load(builder, at, nir.V_I32, 4)
            for number, column in enumerate(_both_halves(builder, packed, nir.V_I32)):
                totals = [
                    self.dot(builder, total, column, _word(builder, row, 2 * index + number))
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
        lanes = ir.Constant(nir.V_I32, list(range(16)))
        return [
            builder.shuffle_vector(self._widen(builder, first), self._widen(builder, last), lanes)
            for first, last in zip(*sums, strict=True)
        ]

    def _codes(self, builder, place):
        return _both_halves(builder, nir.load(builder, place, _V8_I32, 4), _V8_I32)

    def _given(self, builder, row, step):
        word, undefined = _word(builder, row, step), ir.Constant(nir.V_I32, ir.Undefined)
        return builder.shuffle_vector(word, undefined, ir.Constant(_V8_I32, [0] * 8))

    def _add_pairs(self, builder, codes, given):
        operands = [builder.bitcast(each, _V32_I8) for each in (codes, given)]
        return nir.call(builder, "llvm.x86.avx2.pmadd.ub.sw", _V16_I16, operands)

    def _widen(self, builder, sums):
        ones = ir.Constant(_V16_I16, [1] * 16)
        return nir.call(builder, "llvm.x86.avx2.pmadd.wd", _V8_I32, [sums, ones])
