"""Signs of life of the threads that compute, for whoever must tell a long step from one that never ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_DECAY = 0.98
"""Of the longest gap, with each step: one hiccup, or a first step's compilation, does not count for ever."""
_USUAL = 2
"""A step up to so many times as large as one that was computed before is nothing new."""


@dataclass(frozen=True, slots=True)
class Vitals:
    """`stalled_s`: how long nothing has moved while there was something to do, 0 while there is not. `longest_s`: how
    long that took lately where it went on in the end. `unusual`: the step under way is larger than any before, so that
    nobody knows how long it may take."""

    stalled_s: float
    longest_s: float
    unusual: bool


class Progress:
    """What the step thread and the forward worker leave behind as they go, and any thread may read.

    The step thread calls `work` when it turns to something, `rest` before it waits for something to do, and `begin`
    and `end` around each step; whoever computes calls `mark` again and again, about once a layer. Nothing blocks: all
    of it is writing a number.
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

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens has been submitted."""
        self._in_flight.append(num_tokens)

    def end(self, *, computed: bool) -> None:
        """The oldest step in flight has been collected; whether it was computed, or failed."""
        self.mark()  # on a device that computes behind the host's back, this is where its time is seen
        num_tokens = self._in_flight.popleft()
        self._longest *= _DECAY
        if computed:
            self._largest = max(self._largest, num_tokens)

    def vitals(self) -> Vitals:
        stalled = 0.0 if self._resting else max(0.0, self._clock() - self._at)
        largest = max(tuple(self._in_flight), default=0)
        return Vitals(stalled, self._longest, largest > _USUAL * self._largest)
