"""Large memory on the host."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 << 20


def untouched_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zero pages of the operating system, which take no memory before they are touched. torch's own zeros are written
    one by one: some seconds for 4 GiB. Aligned to a cache line, as torch's.

    A tensor larger than a huge page is placed in huge pages where the system gives them on request (Linux's transparent
    huge pages). The first touch of small pages, a fault each, took a twentieth of a prompt's time, and reads of
    scattered blocks need fewer address translations. Raises MemoryError if there is not enough memory.
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
