"""Whether numba works on this machine, by the smallest kernel that has a vector, a thread's atomic and the cache."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from loraplex.kernels.numba_runtime.cache import KERNELS
from loraplex.kernels.numba_runtime.vectors import fetch_add, horizontal_sum, jit, load


def probe() -> None:
    """Raises whatever numba or LLVM raises where one of them is not fit for this machine, and RuntimeError where what
    it has compiled is wrong."""
    KERNELS.compile("probe", _check)


def _check() -> None:
    numbers, counter = np.ones(16, np.float32), np.full(1, 26, np.int64)
    total = _sum_and_count(numbers.ctypes.data, counter.ctypes.data, np.float32(0))
    if (total, counter[0]) != (42.0, 27):
        raise RuntimeError(f"a compiled kernel computes {total} and {counter[0]} where 42 and 27 are right")


@jit
def _sum_and_count(numbers, counter, like):
    return horizontal_sum(load(numbers, like)) + fetch_add(counter, 1)
