"""Large memory on the host."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch

_HUGE_PAGE = 2 << 20
_POOLED = 16 * _HUGE_PAGE
"""Bytes of one mapping of a pool; larger tensors have their own."""


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


class HugePagePool:
    """Tensors side by side in huge pages. For weights: each read of a step goes over all of them, and those of a small
    model are less than a huge page each. A tensor keeps the memory of its neighbours."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros, aligned to a cache line. Raises MemoryError as `untouched_zeros` does."""
        num_bytes = math.prod(sizes) * dtype.itemsize
        if num_bytes >= _POOLED:
            return untouched_zeros(sizes, dtype)
        if num_bytes > len(self._rest):
            self._rest = untouched_zeros((_POOLED,), torch.uint8)
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // 64) * 64 :]
        return taken.view(dtype).view(sizes)
