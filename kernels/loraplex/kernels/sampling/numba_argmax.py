"""The largest logit of each row on a CPU, compiled by numba: all that greedy decoding needs of them."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from loraplex.kernels.numba_runtime import ir as nir
from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import jit, read_int64


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [S, V] float32, contiguous → tokens [S] int64, the first of the largest of each row, and ok [S] bool:
    False where not all of a row is finite; its token is any. Raises ValueError for other logits."""
    rows, columns = logits.shape
    if logits.dtype is not torch.float32 or not logits.is_contiguous() or not columns:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not contiguous rows of float32")
    tokens = torch.empty(rows, dtype=torch.int64)
    ok = torch.empty(rows, dtype=torch.bool)
    _scan.run((), logits.data_ptr(), rows, columns, tokens.data_ptr(), ok.data_ptr())
    return tokens, ok


@intrinsic
def _scan_row(typing, row, columns, token, ok):
    def lower(context, builder, signature, values):
        row, columns, token, ok = values
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
        total = nir.call(
            builder, "llvm.vector.reduce.fadd.v16f32", nir.F32, [ir.Constant(nir.F32, 0.0), spoiled]
        )
        is_ok = builder.fcmp_ordered("==", total, ir.Constant(nir.F32, 0.0))
        nir.store(builder, builder.zext(is_ok, nir.I8), ok, 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), lower


@jit
def scan_row(logits, columns, tokens, ok, row):
    """`largest` of one row, all by address."""
    _scan_row(logits + row * columns * 4, columns, tokens + row * 8, ok + row)


def _scan_units(team, arguments):
    logits, rows, columns = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    tokens, ok = read_int64(arguments + 24), read_int64(arguments + 32)
    while True:
        row = take_unit(team, rows)
        if row >= rows:
            break
        scan_row(logits, columns, tokens, ok, row)


_scan = Kernel(_scan_units, "qqqqq")
