"""The largest logit of each row on a CPU, compiled by numba: all that greedy decoding needs of them.

A row with a mask is read once as well: what it bars becomes -inf on the way. A row is one thread's work, so its token
does not depend on threads or neighbours.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import jit, read_int64
from loraplex.kernels.sampling.types import TokenMasks


def largest(logits: torch.Tensor, masks: TokenMasks | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [S, V] float32, contiguous → tokens [S] int64, the first of the largest of each row, and ok [S] bool:
    False where not all of a row is finite; its token is any. Logits that `masks` bars become -inf; a row is not ok
    either if none is left. Raises ValueError for other logits or masks."""
    rows, columns = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous() or not columns:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not contiguous rows of float32")
    places = bits = 0
    if masks is not None:
        _check(masks, rows, columns)
        places, bits = masks.places.data_ptr(), masks.bits.data_ptr()
    tokens = torch.empty(rows, dtype=torch.int64)
    ok = torch.empty(rows, dtype=torch.bool)
    _scan.run((), logits.data_ptr(), rows, columns, places, bits, tokens.data_ptr(), ok.data_ptr())
    return tokens, ok


def _check(masks: TokenMasks, rows: int, columns: int) -> None:
    words, bits, places = -(-columns // 32), masks.bits, masks.places
    if bits.shape != (len(masks.rows), words) or bits.dtype is not torch.int32 or not bits.is_contiguous():
        raise ValueError(
            f"bits {list(bits.shape)} {bits.dtype} are not {words} words of int32 for each masked row"
        )
    if places.shape != (rows,) or places.dtype is not torch.int64 or not places.is_contiguous():
        raise ValueError(f"places {list(places.shape)} {places.dtype} are not {rows} numbers of int64")


def _scan_into(context, builder, row, columns, token, ok, bits=None):
    """`largest` of one row, all by address. What `bits` bars is overwritten."""
    lanes = ir.Constant(nir.V_I32, list(range(nir.LANES)))
    lowest = nir.vector(nir.V_F32, float("-inf"))
    zero = nir.vector(nir.V_F32, 0.0)

    def step(index, carried, mask=None):
        best, places, spoiled = carried
        address = builder.add(row, builder.shl(index, nir.i64(2)))
        if mask is None:
            found = nir.load(builder, address, nir.V_F32, 4)
        else:
            found = nir.masked_load(builder, address, mask, nir.V_F32, "v16f32", 4)
        # 0 for a finite number, NaN for any other.
        spoiled = nir.fma(builder, found, zero, spoiled)
        if bits is not None:
            # Where the last vector is empty there may be no word for it.
            within = builder.select(builder.icmp_signed("<", index, columns), index, nir.i64(0))
            word = nir.load(builder, builder.add(bits, builder.lshr(within, nir.i64(3))), nir.I16, 2)
            allowed = builder.bitcast(word, nir.V_I1)
            found = builder.select(allowed, found, lowest)
            if mask is None:
                nir.store(builder, found, address, 4)
            else:
                nir.masked_store(builder, found, address, mask, "v16f32", 4)
        if mask is not None:
            found = builder.select(mask, found, lowest)
        here = builder.add(lanes, nir.splat(builder, builder.trunc(index, nir.I32)))
        larger = builder.fcmp_ordered(">", found, best)
        return [builder.select(larger, found, best), builder.select(larger, here, places), spoiled]

    whole = builder.and_(columns, nir.i64(-nir.LANES))
    start = [lowest, nir.vector(nir.V_I32, 0), zero]
    carried = nir.loop(builder, whole, nir.LANES, start, step)
    mask = nir.lane_mask(builder, nir.i64(0), builder.sub(columns, whole))
    best, places, spoiled = step(whole, carried, mask)
    value, place = (builder.extract_element(vector, ir.Constant(nir.I32, 0)) for vector in (best, places))
    for lane in range(1, nir.LANES):
        other, there = (
            builder.extract_element(vector, ir.Constant(nir.I32, lane)) for vector in (best, places)
        )
        larger = builder.fcmp_ordered(">", other, value)
        earlier = builder.and_(
            builder.fcmp_ordered("==", other, value), builder.icmp_signed("<", there, place)
        )
        chosen = builder.or_(larger, earlier)
        value = builder.select(chosen, other, value)
        place = builder.select(chosen, there, place)
    nir.store(builder, builder.sext(place, nir.I64), token, 8)
    total = nir.call(builder, "llvm.vector.reduce.fadd.v16f32", nir.F32, [ir.Constant(nir.F32, 0.0), spoiled])
    is_ok = builder.fcmp_ordered("==", total, ir.Constant(nir.F32, 0.0))
    if bits is not None:
        is_left = builder.fcmp_ordered(">", value, ir.Constant(nir.F32, float("-inf")))
        is_ok = builder.and_(is_ok, is_left)
    nir.store(builder, builder.zext(is_ok, nir.I8), ok, 1)
    return context.get_dummy_value()


@intrinsic
def _scan_row(typing, row, columns, token, ok):
    def lower(context, builder, signature, values):
        return _scan_into(context, builder, *values)

    return types.void(*[types.int64] * 4), lower


@intrinsic
def _scan_masked_row(typing, row, columns, token, ok, bits):
    def lower(context, builder, signature, values):
        return _scan_into(context, builder, *values)

    return types.void(*[types.int64] * 5), lower


@jit
def _scan_one(row, columns, token, ok, place, bits):
    if place < 0:
        _scan_row(row, columns, token, ok)
    else:
        _scan_masked_row(row, columns, token, ok, bits + place * ((columns + 31) // 32) * 4)


def _scan_units(team, arguments):
    logits, rows, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    places, bits = read_int64(arguments + 24), read_int64(arguments + 32)
    tokens, ok = read_int64(arguments + 40), read_int64(arguments + 48)
    while True:
        row = take_unit(team, rows)
        if row >= rows:
            break
        place = read_int64(places + 8 * row) if places else -1
        _scan_one(logits + row * columns * 4, columns, tokens + row * 8, ok + row, place, bits)


_scan = Kernel(_scan_units, "qqqqqqq")
