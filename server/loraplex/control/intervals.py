"""Intervals of shares that were counted."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

_Z = NormalDist().inv_cdf(0.975)
"""The normal distribution's quantile for an interval of 95 %."""


class Interval(NamedTuple):
    """Bounds of a share at 95 %."""

    low: float
    high: float


def wilson_interval(hits: int, count: int) -> Interval:
    """Wilson's score interval of `hits` in `count`, at least 1, at 95 % (Wilson 1927): good for shares near 0 too."""
    share, spread = hits / count, _Z * _Z / count
    middle = share + spread / 2
    half = _Z * math.sqrt((share * (1 - share) + spread / 4) / count)
    return Interval(max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread)))
