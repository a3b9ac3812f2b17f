"""How far the service of two tenants drifts apart while both keep waiting."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations


@dataclass(slots=True)
class _Pair:
    """The least and the most that one was ahead of the other, since both began to wait."""

    low: float
    high: float


class Gaps:
    """The largest difference in service per weight between two tenants, over any interval in which both were backlogged
    throughout: what the bound of Sheng et al., theorem 4.4, speaks of."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._last: dict[str, float] = dict.fromkeys(weights, 0.0)

    def measure(self, backlogged: Collection[str], units: Mapping[str, float]) -> float | None:
        """After a step: who was backlogged from before it until after it, and the service that each tenant had so far.
        Returns the largest gap over an interval that ends here, None where no two are backlogged."""
        pairs: dict[tuple[str, str], _Pair] = {}
        worst: float | None = None
        for one, other in combinations(sorted(backlogged), 2):
            pair = self._pairs.get((one, other))
            if pair is None:
                began = self._ahead(one, other, self._last)
                pair = _Pair(began, began)
            now = self._ahead(one, other, units)
            pair.low, pair.high = min(pair.low, now), max(pair.high, now)
            pairs[one, other] = pair
            worst = max(worst or 0.0, now - pair.low, pair.high - now)
        self._pairs = pairs
        self._last = dict(units)
        return worst

    def _ahead(self, one: str, other: str, units: Mapping[str, float]) -> float:
        return units[one] / self._weights[one] - units[other] / self._weights[other]
