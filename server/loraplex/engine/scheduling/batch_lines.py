"""When lines of batches are scheduled as all other requests are: while none of these is here."""

from __future__ import annotations

from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease
from loraplex.engine.scheduling.adapter_scheduling import AdapterScheduler
from loraplex.engine.scheduling.background import BackgroundSequences
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.line_share import REST_S
from loraplex.engine.types import Sequence, SequenceState

QUIET_S = 1.0
"""Seconds without another request after which lines take whole steps. A request that comes then waits for the step in
flight; one that comes soon after the last finds a short one."""


class BatchLines:
    """Moves lines from the `background` into the `queue` and among those `running`, and back. `is_on`: they are there,
    and nothing else is. A sequence keeps its blocks on both ways."""

    def __init__(
        self,
        background: BackgroundSequences,
        queue: FairQueue,
        adapters: AdapterScheduler,
        running: dict[Sequence, Lease | None],
        cache: AdapterCache[Any],
    ) -> None:
        self._background = background
        self._queue = queue
        self._adapters = adapters
        self._running = running
        self._cache = cache
        self.is_on = False

    @property
    def num_blocks(self) -> int:
        """KV blocks that lines hold outside of the background."""
        return sum(seq.num_held for seq in self._running) if self.is_on else 0

    def begin_step(self, now: float, *, others: bool) -> None:
        """`others`: whether a request that is in no background waits or runs."""
        share = self._background.line_share
        if others:
            share.others_at = now
        elif self._background.has_ready(batch=False):
            self.make_way()
        elif self.is_on or now - share.others_at >= QUIET_S:
            self.is_on = True
            for seq in self._background.take_lines():
                self._move_in(seq, now)

    def wait_s(self, now: float) -> float | None:
        """The time until lines in the background can do something, if no other request is here: those with their
        adapters may run alone, others have them loaded. None without such lines."""
        background = self._background
        if not background.has_lines:
            return None
        pause = REST_S if background.has_ready(batch=True) else QUIET_S
        return max(0.0, background.line_share.others_at + pause - now)

    def make_way(self) -> None:
        """Another request comes: all lines go back to the background."""
        if not self.is_on:
            return
        self.is_on = False
        for seq, lease in self._running.items():
            if lease is not None:
                self._cache.release(lease)
            self._queue.leave(seq)
        for seq in [*self._queue.requests]:
            self._adapters.request_left(self._queue.remove(seq))
            self._queue.leave(seq)
            self._background.put_line(seq)
        for seq in self._running:
            self._background.put_line(seq)
        self._running.clear()

    def _move_in(self, seq: Sequence, now: float) -> None:
        self._queue.enter(seq)
        if seq.state is not SequenceState.RUNNING:
            self._adapters.request_joined(self._queue.push(seq), now)
            return
        ref = seq.request.adapter
        lease = None if ref is None else self._cache.acquire(ref.digest, counts=False)
        seq.slot = -1 if lease is None else lease.slot
        self._running[seq] = lease
