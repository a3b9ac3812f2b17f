"""Limits on how fast a tenant's keys may change things: changes run one after another, and each writes an audit row
that is never deleted. A series may limit its pushes further."""

from __future__ import annotations

import time
from collections.abc import Callable

from loraplex.admin.problem import Problem
from loraplex.control.limits.gcra import PERIOD_S, RateWindow

MAX_CHANGES = 600
"""Changes of each tenant in a minute; all of them may come at once. The admin token has no limit."""
SWEEP_FROM = 4096


class ChangeRateLimit:
    """Counts the changes of one server, over both ports. `clock` is monotonic seconds."""

    def __init__(
        self, max_changes: int = MAX_CHANGES, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_changes = max_changes
        self._clock = clock
        self._windows: dict[str, RateWindow] = {}
        self._sweep_at = SWEEP_FROM

    def charge_change(self, tenant_id: str, count: int = 1) -> None:
        """Counts `count` changes of this tenant, all or none. Raises Problem (429)."""
        told = f"A tenant's keys may change {self._max_changes} things a minute."
        self._charge(tenant_id, count * PERIOD_S / self._max_changes, told)

    def charge_push(self, tenant_id: str, name: str, quota: int) -> None:
        """Counts a push to a series that takes `quota` of them a minute. Raises Problem (429)."""
        told = f"The series '{name}' takes {quota} pushes a minute."
        self._charge(f"{tenant_id}/{name}", PERIOD_S / quota, told)

    def _charge(self, what: str, cost: float, told: str) -> None:
        now = self._clock()
        window = self._windows.setdefault(what, RateWindow())
        wait = window.wait(cost, now)
        if wait:
            raise Problem("rate_limit_exceeded", told, retry_after_s=wait)
        window.charge(cost, now)
        if len(self._windows) > self._sweep_at:
            self._windows = {name: one for name, one in self._windows.items() if not one.is_idle(now)}
            self._sweep_at = 2 * len(self._windows) + SWEEP_FROM
