"""Copies of adapters to the device, in pieces that others' copies can get between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

PIECE_BYTES = 4 << 20
MAX_QUEUED = 2
"""Pieces that are queued at a time: one is being copied, the next waits."""


class CopyQueue(Protocol):
    """Where copies to a device are queued."""

    def enqueue(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        """Queue one copy. Returns a function that waits until it has been done."""
        ...


class HostQueue:
    """A device that is the host: a copy is done at once, in the calling thread alone. torch would start a team of
    threads for it, beside the step's."""

    def enqueue(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        np.copyto(target.numpy(), source.numpy())
        return _done


class StreamQueue:
    """The current stream of the calling thread."""

    def enqueue(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize


class PacedCopies:
    """Copies that leave the device's copy engine to others in between.

    An engine does one copy after another, whatever their streams. An adapter of 335 MB queued at once would keep the
    inputs of the next step waiting until it has been copied; so no more than MAX_QUEUED pieces of it are queued at any
    time.
    """

    def __init__(self, queue: CopyQueue) -> None:
        self._queue = queue
        self._queued: deque[tuple[Callable[[], None], int]] = deque()

    def copy(
        self, source: torch.Tensor, target: torch.Tensor, arrived: Callable[[int], None] | None = None
    ) -> None:
        """Both uint8 [pages, page_bytes]. Waits for earlier pieces; the last ones may be under way when it returns.
        `arrived` is told the pages of each earlier piece that has been done."""
        step = max(1, PIECE_BYTES // source.shape[1])
        for first in range(0, source.shape[0], step):
            while len(self._queued) >= MAX_QUEUED:
                self._wait(arrived)
            piece = source[first : first + step]
            done = self._queue.enqueue(piece, target[first : first + step])
            self._queued.append((done, piece.shape[0]))

    def finish(self, arrived: Callable[[int], None] | None = None) -> None:
        """Wait for all of them. `arrived` as of `copy`."""
        while self._queued:
            self._wait(arrived)

    def forget(self) -> None:
        """Drop what an earlier image that failed has left in the queue."""
        self._queued.clear()

    def _wait(self, arrived: Callable[[int], None] | None) -> None:
        wait, num_pages = self._queued.popleft()
        wait()
        if arrived is not None:
            arrived(num_pages)


def _done() -> None:
    """There is nothing to wait for."""
