"""Heartbeats of the compute threads. The watchdog uses them to distinguish a long step from one that never ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_DECAY = 0.98
"""Decay of the longest gap with each step, so that one hiccup, or a first step's compilation, stops to count."""
_USUAL = 2
"""A step up to this number of times as large as a computed one is not unusual."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """`stalled_s`: seconds without a heartbeat while there is work, 0 without work. `longest_s`: the longest gap of
    this kind recently that ended by itself. `unusual`: the step in flight is larger than any before, so that its
    duration is unknown."""

    stalled_s: float
    longest_s: float
    unusual: bool


class StepHeartbeat:
    """Written by the step thread and the forward worker, readable by any thread.

    The step thread calls `work` when it begins work, `rest` before it waits for work, and `step_submitted` and
    `step_collected` around each step. The compute thread calls `mark` about once a layer. No call blocks: each only
    writes a number.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._resting = True
        self._longest = 0.0
        self._largest = 0
        self._in_flight: deque[int] = deque()

    def work(self) -> None:
        if self._resting:
            self._at = self._clock()
            self._resting = False
        else:
            self.mark()

    def rest(self) -> None:
        self._resting = True

    def mark(self) -> None:
        now = self._clock()
        self._longest = max(self._longest, now - self._at)
        self._at = now

    def step_submitted(self, num_tokens: int) -> None:
        """A step of `num_tokens` tokens was submitted."""
        self._in_flight.append(num_tokens)

    def step_collected(self, *, computed: bool) -> None:
        """The oldest step in flight was collected: computed, or failed."""
        self.mark()  # on a device that computes behind the host's back, this is where its time is seen
        num_tokens = self._in_flight.popleft()
        self._longest *= _DECAY
        if computed:
            self._largest = max(self._largest, num_tokens)

    def vitals(self) -> Vitals:
        stalled = 0.0 if self._resting else max(0.0, self._clock() - self._at)
        largest = max(tuple(self._in_flight), default=0)
        return Vitals(stalled, self._longest, largest > _USUAL * self._largest)
