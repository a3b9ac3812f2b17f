"""Sampling a token a row from its weights on a CPU, compiled by numba.

A row's weights are w = exp((x - largest) / temperature), 1 at most, in the place of its logits. Whether top_k and top_p
let a token through is decided by one least weight, found without sorting: numbers that are not negative have the order
of their bits, so the weights are counted (or added up) by their leading bits, and those that share the deciding ones
by the bits that follow. The token is the one at which the running sum, in the order of the vocabulary, exceeds
uniform · the whole sum; that inverts the cumulative distribution.

A row is one thread's work from its first pass to its last, so its token does not depend on threads or neighbours.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    at_least,
    exp,
    horizontal_sum,
    jit,
    load_some,
    maximum,
    read_float32,
    read_float64,
    read_int32,
    read_int64,
    splat,
    store_some,
    write_float64,
    write_int64,
)
from loraplex.kernels.sampling.types import Option, Options

_BINS = 8192
"""Bins of the leading 13 of a weight's 30 bits; 9 and 8 follow."""
_BLOCK = 512
"""Weights that are added up in float32, sixteen sums at a time; blocks are added up in float64."""
_F32 = np.float32(0)
_ROW = 8 * len(Option)
"""Bytes of a row's options; behind its begin lie these."""
_TEMPERATURE, _TOP_K, _TOP_P = 8 * Option.TEMPERATURE, 8 * Option.TOP_K, 8 * Option.TOP_P
_MIN_P, _UNIFORM = 8 * Option.MIN_P, 8 * Option.UNIFORM


def draw(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    ok: torch.Tensor,
    options: Options,
) -> None:
    """Draw for the rows of logits [S, V] float32, contiguous, that are not greedy; these are overwritten.

    tokens [S] int64: of each row the place of its largest logit, which is finite where ok [S] bool is set; the
    sampled tokens replace them. Rows that are not ok keep theirs. Raises ValueError for logits of another kind.
    """
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not contiguous rows of float32")
    rows = torch.from_numpy(options.drawn)
    # One histogram a row: only those of rows with top_k or top_p are ever touched.
    bins = torch.empty(len(rows), _BINS, dtype=torch.float64)
    given = (tokens, ok.long(), rows, options.device, bins)
    _draw_all.run((), logits.data_ptr(), logits.shape[1], len(rows), *(tensor.data_ptr() for tensor in given))


@jit
def _weigh(row, columns, best, temperature):
    top, heat, nothing = splat(best), splat(temperature), splat(_F32)
    for c in range(0, columns, 16):
        x = load_some(row + 4 * c, columns - c, _F32)
        # The maximum takes 0 for NaN, which -inf at an infinite temperature gives.
        store_some(maximum(exp((x - top) / heat), nothing), row + 4 * c, columns - c, _F32)


@jit
def _sum_block(row, first, columns, least):
    total, low = splat(_F32), splat(least)
    for c in range(first, min(first + _BLOCK, columns), 16):
        total = total + at_least(load_some(row + 4 * c, columns - c, _F32), low)
    return np.float64(horizontal_sum(total))


@jit
def _sum(row, columns, least):
    total = 0.0
    for first in range(0, columns, _BLOCK):
        total += _sum_block(row, first, columns, least)
    return total


@jit
def _least(row, columns, bins, limit, by_sum):
    """The bits of the largest weight such that the weights that reach it are `limit`, by number or by sum; 0 where
    all together are not."""
    above, prefix, known = 0.0, 0, 30
    for width in (13, 9, 8):
        shift = known - width
        for b in range(1 << width):
            write_float64(0.0, bins + 8 * b)
        for c in range(columns):
            bits = read_int32(row + 4 * c)
            if bits > 0 and bits >> known == prefix:
                place = bins + 8 * ((bits >> shift) & ((1 << width) - 1))
                write_float64(
                    read_float64(place) + (np.float64(read_float32(row + 4 * c)) if by_sum else 1.0), place
                )
        chosen = -1
        for b in range((1 << width) - 1, -1, -1):
            held = read_float64(bins + 8 * b)
            if held > 0:
                chosen = b
                if above + held >= limit:
                    break
                above += held
        else:
            # Among those that share the leading bits only rounding can lead here: the last of them decides.
            if width == 13:
                return 0
        prefix = (prefix << width) | chosen
        known = shift
    return prefix


@jit
def _pick(row, columns, least, target):
    """The first place at which the running sum exceeds the target; the last with a weight where rounding keeps the sum
    from it."""
    before, last = 0.0, -1
    for first in range(0, columns, _BLOCK):
        held = _sum_block(row, first, columns, least)
        if held > 0.0:
            last = first
            if before + held > target:
                break
            before += held
    first, chosen = last, last
    for c in range(first, min(first + _BLOCK, columns)):
        weight = read_float32(row + 4 * c)
        if weight >= least and weight > _F32:
            chosen = c
            before += np.float64(weight)
            if before > target:
                break
    return chosen


@jit
def _threshold(row, columns, bins, k, p):
    """The least weight that top_k and top_p let through."""
    bits, least = 0, _F32
    if 0 < k < columns:
        bits = _least(row, columns, bins, np.float64(k), False)
    if bits:
        write_int64(bits, bins)
        least = read_float32(bins)
    if p < 1.0:
        # top_p shares out what top_k left.
        bits = max(bits, _least(row, columns, bins, p * _sum(row, columns, least), True))
    write_int64(bits, bins)
    return read_float32(bins)


@jit
def _draw_row(row, columns, token, options, bins):
    k, p = np.int64(read_float64(options + _TOP_K)), read_float64(options + _TOP_P)
    best = read_float32(row + 4 * read_int64(token))
    _weigh(row, columns, best, np.float32(read_float64(options + _TEMPERATURE)))
    least = np.float32(read_float64(options + _MIN_P))
    if 0 < k < columns or p < 1.0:
        least = max(least, _threshold(row, columns, bins, k, p))
    target = read_float64(options + _UNIFORM) * _sum(row, columns, least)
    write_int64(_pick(row, columns, least, target), token)


def _draw_units(team, arguments):
    logits, columns, size = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    tokens, ok, rows = read_int64(arguments + 24), read_int64(arguments + 32), read_int64(arguments + 40)
    options, bins = read_int64(arguments + 48), read_int64(arguments + 56)
    while True:
        r = take_unit(team, size)
        if r >= size:
            break
        s = read_int64(rows + 8 * r)
        if read_int64(ok + 8 * s):
            _draw_row(
                logits + s * columns * 4, columns, tokens + 8 * s, options + _ROW * s, bins + 8 * _BINS * r
            )


_draw_all = Kernel(_draw_units, "qqqqqqqq")
