"""Expected times of an adapter's way to the device."""

from __future__ import annotations

from loraplex.adapters.cache.entries import CachedAdapter, Stage
from loraplex.adapters.cache.residency import ImageT

_NEWEST = 0.2
"""The share of the newest load in the mean, so that some five loads count."""


class LoadTimes:
    """Running means of the seconds that loads and copies took. 0 until there was one."""

    def __init__(self) -> None:
        self._mean = {"disk": 0.0, "copy": 0.0}

    def took(self, stage: str, seconds: float) -> None:
        """A load ("disk") or a copy ("copy") has ended."""
        mean = self._mean[stage]
        self._mean[stage] = mean + _NEWEST * (seconds - mean) if mean else seconds

    def seconds_left(
        self, entry: CachedAdapter[ImageT] | None, now: float, *, loads_ahead: int, max_loads: int
    ) -> float:
        """Until an adapter is on the device, if nothing but loads and its copy keeps it: `loads_ahead` begin before its
        own, `max_loads` at a time. None is an adapter that is cold."""
        if entry is None:
            return (loads_ahead // max_loads + 1) * self._mean["disk"] + self._mean["copy"]
        spent = now - entry.since
        match entry.stage:
            case Stage.LOADING:
                return _left(self._mean["disk"], spent) + self._mean["copy"]
            case Stage.HOST:
                return self._mean["copy"]
            case Stage.COPYING:
                return _left(self._mean["copy"], spent)
            case Stage.DEVICE:
                return 0.0


def _left(mean: float, spent: float) -> float:
    """Seconds left of work that takes `mean` on average. Work that has taken longer is expected to take as long again:
    a client that comes back too early finds it twice as old, and is told twice the time."""
    return mean - spent if spent <= mean else spent
