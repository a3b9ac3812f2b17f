"""Barring tokens of rows on a CPU, compiled by numba: what is not allowed becomes -inf, and the row's largest logit is
found again in the same turn.

A row is one thread's work, so its token does not depend on threads or neighbours.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    jit,
    read_int32,
    read_int64,
    splat,
    store_some,
    write_float32,
)
from loraplex.kernels.sampling.numba_argmax import scan_row
from loraplex.kernels.sampling.types import TokenMasks

_BARRED = np.float32(-np.inf)
_F32 = np.float32(0)


def bar_tokens(logits: torch.Tensor, tokens: torch.Tensor, ok: torch.Tensor, masks: TokenMasks) -> None:
    """logits [S, V] float32, contiguous: those that `masks` does not allow become -inf. Of the masked rows, tokens [S]
    int64 become the places of the largest logits that are left, and ok [S] bool is cleared where none is left or the
    largest is not finite. Raises ValueError for other logits or masks."""
    columns = logits.shape[1]
    words = -(-columns // 32)
    bits = masks.bits
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not contiguous rows of float32")
    if bits.shape != (len(masks.rows), words) or bits.dtype is not torch.int32 or not bits.is_contiguous():
        raise ValueError(
            f"bits {list(bits.shape)} {bits.dtype} are not {words} words of int32 for each masked row"
        )
    all_finite = torch.empty(len(tokens), dtype=torch.bool)  # of no use here: what is barred is not
    rows = masks.rows.contiguous()
    _bar_all.run(
        (),
        logits.data_ptr(),
        columns,
        len(rows),
        rows.data_ptr(),
        bits.data_ptr(),
        tokens.data_ptr(),
        all_finite.data_ptr(),
    )
    best = logits[rows, tokens[rows]]
    ok.index_copy_(0, rows, ok.index_select(0, rows) & best.isfinite())


@jit
def _bar_row(row, columns, bits):
    nothing = splat(_BARRED)
    for first in range(0, columns, 32):
        word = read_int32(bits + first // 8)
        if word == -1:
            continue
        size = min(32, columns - first)
        start = row + 4 * first
        if word == 0:
            store_some(nothing, start, size, _F32)
            if size > 16:
                store_some(nothing, start + 64, size - 16, _F32)
            continue
        for bit in range(size):
            if not (word >> bit) & 1:
                write_float32(_BARRED, start + 4 * bit)


def _bar_units(team, arguments):
    logits, columns, size = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    rows, bits = read_int64(arguments + 24), read_int64(arguments + 32)
    tokens, ok = read_int64(arguments + 40), read_int64(arguments + 48)
    words = (columns + 31) // 32
    while True:
        c = take_unit(team, size)
        if c >= size:
            break
        row = read_int64(rows + 8 * c)
        _bar_row(logits + row * columns * 4, columns, bits + c * words * 4)
        scan_row(logits, columns, tokens, ok, row)


_bar_all = Kernel(_bar_units, "qqqqqqq")
