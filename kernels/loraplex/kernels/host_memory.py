"""Large memory on the host."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 << 20


def untouched_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of the system's, which take no memory before they are touched: torch's own are written one by one, for 4
    GiB in some seconds. From a cache line's beginning, as torch's.

    What is larger than a huge page lies in such where the system gives them on request (Linux's transparent huge
    pages): the first touch of small pages, a fault each, took a twentieth of a prompt's time, and reading scattered
    blocks looks up fewer addresses. Raises MemoryError where there is not so much.
    """
    num_bytes = math.prod(sizes) * dtype.itemsize
    step = _HUGE_PAGE if num_bytes >= _HUGE_PAGE else 64
    try:
        # Private: shared memory, which is mmap's default, has settings of its own, by which it gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, num_bytes + step, flags=flags)  # lives as long as the tensor
    except OSError as error:
        raise MemoryError(f"the system has no {num_bytes} bytes of memory: {error.strerror}") from error
    if step == _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    first = -memory.ctypes.data % step
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(sizes)
