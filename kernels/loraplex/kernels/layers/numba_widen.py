"""Logits in float32 on a CPU, compiled by numba. torch's own conversion wakes OpenMP's threads, which have to wait for
a core that the kernels' threads have left."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np
import torch

from loraplex.kernels.numba_runtime.thread_team import SMALL, Kernel, take_unit
from loraplex.kernels.numba_runtime.vectors import (
    LIKE,
    jit,
    load_some,
    read_int64,
    size_of,
    store_some,
)

_F32 = np.float32(0)
_SHARE = 1 << 14
"""Elements of a unit, a multiple of a vector's."""


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """x, of any shape and a dtype of `LIKE`, in float32: itself where it is, else contiguous."""
    if x.dtype is torch.float32:
        return x
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    count = x.numel()
    _widen_all.run((LIKE[x.dtype],), x.data_ptr(), out.data_ptr(), count, alone=count <= SMALL)
    return out


@jit
def _widen(x, out, first, last, like):
    for i in range(first, last, 16):
        store_some(load_some(x + i * size_of(like), last - i, like), out + i * 4, last - i, _F32)


def _widen_units(team, arguments, like):
    x, out, count = read_int64(arguments), read_int64(arguments + 8), read_int64(arguments + 16)
    units = (count + _SHARE - 1) // _SHARE
    while True:
        first = take_unit(team, units) * _SHARE
        if first >= count:
            break
        _widen(x, out, first, min(first + _SHARE, count), like)


_widen_all = Kernel(_widen_units, "qqq")
