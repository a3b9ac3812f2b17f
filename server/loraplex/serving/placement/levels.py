"""How much each adapter is asked for: the sequences that it has in flight, smoothed in time.

Demand rises within seconds, so that a crowd gets its copies, and falls over minutes, so that a pause costs no load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RISE_S = 4.0
"""Time constant of a rise, in seconds."""
HALF_LIFE_S = 120.0
"""Time in which demand that has gone counts half."""
_LEAST = 0.01
"""Sequences below which a version without any in flight is forgotten."""


@dataclass(slots=True)
class _Level:
    in_flight: int = 0
    smoothed: float = 0.0
    at: float = 0.0

    def advance(self, now: float) -> float:
        """The level of a time: `in_flight` has been as it is since `at`."""
        passed = max(0.0, now - self.at)
        gap = self.smoothed - self.in_flight
        kept = math.exp(-passed / RISE_S) if gap < 0 else 0.5 ** (passed / HALF_LIFE_S)
        self.smoothed = self.in_flight + gap * kept
        self.at = now
        return self.smoothed


class DemandLevels:
    """Smoothed sequences in flight by digest. Times in seconds, of one clock that does not go back."""

    def __init__(self) -> None:
        self._levels: dict[str, _Level] = {}

    def begin(self, digest: str, now: float, count: int = 1) -> None:
        """Add `count` sequences to those in flight."""
        level = self._levels.setdefault(digest, _Level(at=now))
        level.advance(now)
        level.in_flight += count

    def end(self, digest: str, now: float, count: int = 1) -> None:
        """Take `count` sequences away."""
        level = self._levels[digest]
        level.advance(now)
        level.in_flight -= count
        assert level.in_flight >= 0

    def levels(self, now: float) -> dict[str, float]:
        """Levels by digest; a digest that is no longer asked for is forgotten."""
        found = {digest: level.advance(now) for digest, level in self._levels.items()}
        for digest, level in list(self._levels.items()):
            if not level.in_flight and level.smoothed < _LEAST:
                del self._levels[digest], found[digest]
        return found
