"""Host memory for adapters: one slab of equal pages, allocated at the start."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.adapters.errors import LoadAbandoned, LoraplexError
from loraplex.kernels.host_memory import untouched_zeros

SPILL_AFTER_S = 1.0
"""How long a load waits for pages before it takes memory outside of the slab."""
_LOOK_AGAIN_S = 0.05


class HostMemoryNotPinned(LoraplexError):
    """The driver does not lock that much memory for copies to the device."""

    code = "host_memory_not_pinned"


class HostPages:
    """The memory of one adapter: `runs` of adjacent pages, uint8 [pages, page_bytes] each. `release` gives it back;
    nothing may read or write it from then on, except by `copy_out`."""

    def __init__(self, runs: Sequence[torch.Tensor], give_back: Callable[[], None] = lambda: None) -> None:
        self.runs = tuple(runs)
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()
        self._num_readers = 0
        self._after_readers: Callable[[], None] | None = None

    @property
    def num_pages(self) -> int:
        return sum(run.shape[0] for run in self.runs)

    @property
    def num_bytes(self) -> int:
        return sum(run.numel() for run in self.runs)

    def release(self) -> None:
        """Raises RuntimeError where it was given back already."""
        with self._lock:
            if self._give_back is None:
                raise RuntimeError("an adapter's host memory was given back twice")
            give_back, self._give_back = self._give_back, None
            self.runs = ()
            if self._num_readers:
                self._after_readers = give_back
                return
        give_back()

    def copy_out(self, part: NDArray[np.uint8]) -> memoryview | None:
        """A copy of a part of the runs, for a thread that does not own the memory; None once it was released. A release
        meanwhile does not wait: the memory is given back when the copy is done."""
        with self._lock:
            if self._give_back is None:
                return None
            self._num_readers += 1
        try:
            return part.copy().data
        finally:
            with self._lock:
                self._num_readers -= 1
                give_back = None if self._num_readers else self._after_readers
            if give_back is not None:
                give_back()


def loose_pages(num_pages: int, page_bytes: int) -> HostPages:
    """Pages of no slab, from torch's allocator."""
    return HostPages([torch.empty(num_pages, page_bytes, dtype=torch.uint8)])


class HostSlab:
    """One piece of memory of as many pages of `page_bytes` as `num_bytes` holds.

    With `pinned` the driver locks it in memory, once, so that copies to a device run by themselves. (torch's own pinned
    memory is allocated while requests are served, in powers of two, and never given back.) Without, the system backs a
    page when it is first written to. An adapter may lie in any pages, so free ones can't be too scattered for it.

    Any thread may call everything here. Raises HostMemoryNotPinned, and MemoryError where there is not enough.
    """

    def __init__(self, num_bytes: int, page_bytes: int, *, pinned: bool = False) -> None:
        self.page_bytes = page_bytes
        self.num_pages = num_bytes // page_bytes
        self._memory = untouched_zeros((self.num_pages, page_bytes), torch.uint8)
        if pinned:
            _pin(self._memory)
            # Else the driver takes what is allocated there later for memory that it has locked.
            weakref.finalize(self, _unpin, self._memory.data_ptr()).atexit = False
        self._free = list(range(self.num_pages))  # ascending
        self._changed = threading.Condition()
        self._waiting: list[list[int]] = []  # the pages that each wants, in the order of their arrival

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_free(self) -> int:
        """Pages."""
        return len(self._free)

    @property
    def shortage(self) -> int:
        """Bytes that must be given back before everything that waits has its pages."""
        with self._changed:
            return (
                max(0, sum(num_pages for (num_pages,) in self._waiting) - len(self._free)) * self.page_bytes
            )

    def take(
        self,
        num_pages: int,
        *,
        wanted: Callable[[], bool] = lambda: True,
        on_shortage: Callable[[], None] = lambda: None,
    ) -> HostPages:
        """Pages with anything in them. Where too few are free, calls `on_shortage` once and waits, first come, first
        served. Memory outside of the slab, which is not pinned, is the last resort: where it takes longer than
        SPILL_AFTER_S, and for an adapter larger than the slab. Raises LoadAbandoned once `wanted` returns False."""
        if num_pages > self.num_pages:
            return loose_pages(num_pages, self.page_bytes)
        with self._changed:
            if not self._waiting and num_pages <= len(self._free):
                return self._hand_out(num_pages)
            place = [num_pages]
            self._waiting.append(place)
        try:
            on_shortage()
            until = time.monotonic() + SPILL_AFTER_S
            with self._changed:
                while self._waiting[0] is not place or num_pages > len(self._free):
                    if not wanted():
                        raise LoadAbandoned("no request waits for this adapter any more")
                    if time.monotonic() >= until:
                        return loose_pages(num_pages, self.page_bytes)
                    self._changed.wait(_LOOK_AGAIN_S)
                return self._hand_out(num_pages)
        finally:
            with self._changed:
                self._waiting = [other for other in self._waiting if other is not place]
                self._changed.notify_all()

    def _hand_out(self, num_pages: int) -> HostPages:
        taken, self._free = self._free[:num_pages], self._free[num_pages:]
        runs = [self._memory[first:end] for first, end in adjacent_runs(taken)]
        return HostPages(runs, lambda: self._take_back(taken))

    def _take_back(self, pages: list[int]) -> None:
        with self._changed:
            self._free = sorted(self._free + pages)
            self._changed.notify_all()


def adjacent_runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """The runs [first, end) of adjacent numbers, in their order."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and runs[-1][1] == page:
            runs[-1] = runs[-1][0], page + 1
        else:
            runs.append((page, page + 1))
    return runs


def _pin(memory: torch.Tensor) -> None:
    status = int(_driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise HostMemoryNotPinned(
            f"--adapter-cpu-memory: the driver does not lock {memory.nbytes >> 20} MiB of host memory (CUDA error "
            f"{status}); set it lower, or raise the limit of locked memory (ulimit -l)"
        )


def _unpin(address: int) -> None:
    _driver().cudaHostUnregister(address)


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it
