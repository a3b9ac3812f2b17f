"""log Σ exp of each row on a CPU, compiled by numba.

torch's own cuts a row into one part a thread where there is one row alone: its bits then depend on the number of rows.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import math

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    exp,
    horizontal_max,
    horizontal_sum,
    keep_lanes,
    load_some,
    maximum,
    read_int64,
    splat,
    write_float32,
)

_F32, _LOWEST = np.float32(0), np.float32(-math.inf)
_BLOCK = 512
"""Columns that are added up in float32, sixteen sums at a time; blocks are added up in float64."""


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """logits [L, V] float32, rows contiguous → [L, 1]; not finite where a row is not. Raises ValueError for other
    logits."""
    rows, columns = logits.shape
    if logits.dtype is not torch.float32 or not columns:
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype} are not rows of float32")
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(rows, 1)
    _all.run((), logits.data_ptr(), logits.stride(0) * 4, rows, columns, out.data_ptr())
    return out


def _units(team, arguments):
    logits, stride, rows = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    columns, out = read_int64(arguments + 24), read_int64(arguments + 32)
    while True:
        number = take_unit(team, rows)
        if number >= rows:
            break
        row = logits + number * stride
        highest = splat(_LOWEST)
        for c in range(0, columns, 16):
            x = load_some(row + 4 * c, columns - c, _F32)
            if columns - c < 16:
                x = keep_lanes(x, 0, columns - c, _LOWEST)
            highest = maximum(x, highest)
        top = horizontal_max(highest)
        total = 0.0
        for first in range(0, columns, _BLOCK):
            sums = splat(_F32)
            for c in range(first, min(first + _BLOCK, columns), 16):
                e = exp(load_some(row + 4 * c, columns - c, _F32) - splat(top))
                if columns - c < 16:
                    e = keep_lanes(e, 0, columns - c, _F32)
                sums = sums + e
            total += np.float64(horizontal_sum(sums))
        write_float32(np.float32(math.log(total) + np.float64(top)), out + 4 * number)


_all = Kernel(_units, "qqqqq")
