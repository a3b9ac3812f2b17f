"""Tenants' turns in the background, by the service that their lines of batches got over their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class BackgroundTurns:
    """A counter for each tenant with lines, as `fair_queue` has them. One that comes is lifted to the least counter of
    those that are here; one that leaves in debt finds its debt again as long as others stay."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._lines: Counter[str] = Counter()
        self._charged: dict[str, float] = {}

    def of(self, tenant_id: str) -> float:
        """Service per weight, relative to the other tenants'."""
        return self._charged[tenant_id]

    def enter(self, tenant_id: str) -> None:
        """A line has come."""
        if not self._lines[tenant_id]:
            self._charged[tenant_id] = max(self._charged.get(tenant_id, 0.0), self._least())
        self._lines[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        """A line has ended."""
        self._lines[tenant_id] -= 1
        if self._lines[tenant_id]:
            return
        del self._lines[tenant_id]
        least = self._least() if self._lines else float("inf")
        for other in [t for t, charged in self._charged.items() if charged <= least and t not in self._lines]:
            del self._charged[other]  # it would be lifted beyond that

    def charge(self, tenant_id: str, units: float) -> None:
        self._charged[tenant_id] += units / self._weight(tenant_id)

    def _least(self) -> float:
        return min((self._charged[tenant] for tenant, count in self._lines.items() if count), default=0.0)
