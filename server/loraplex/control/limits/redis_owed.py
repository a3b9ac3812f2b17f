"""A server's copy of windows in Redis, and its spending while Redis is away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_messages import Spending, window_name


class Seen(NamedTuple):
    """The last seen state of a window in Redis: spent `until` then, in seconds of this server's clock."""

    limit: int
    until: float


@dataclass(slots=True)
class _Debt:
    limit: int
    sum: float
    floor: float


class Owed:
    """Spending without Redis that has ended: for each window, as one function of the theoretical arrival time
    (see `gcra`), so that it is as short after an hour as after a second. Times are seconds of this server's clock."""

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def __len__(self) -> int:
        return len(self._debts)

    def add_debt(self, plan: LimitPlan, used_tokens: int | None, at: float) -> None:
        """A request that was let pass then. Those that began later and ended earlier count as if they had come before
        it, which is never less than it was."""
        for charge in plan.rates:
            debt = self._debts.setdefault(window_name(charge), _Debt(charge.limit, 0.0, 0.0))
            cost = charge.kept(used_tokens)
            debt.limit, debt.sum = charge.limit, debt.sum + cost
            debt.floor = max(debt.floor, at) + cost * PERIOD_S / charge.limit

    def spending(self, seen: Mapping[str, Seen], now: float, lost: float) -> Iterator[Spending]:
        """Together with what was last seen in Redis, as far as it still makes a difference now: no window there was
        spent for more than a minute beyond the time when it was `lost`."""
        for name in {**dict.fromkeys(seen), **dict.fromkeys(self._debts)}:
            limit, until = seen.get(name, (0, 0.0))
            debt = self._debts.get(name) or _Debt(limit, 0.0, 0.0)
            most = until
            if debt.sum:
                # What was charged here was charged after the loss: how much less a window was spent by then makes no
                # difference.
                until = max(until, lost)
                most = max(until, lost + PERIOD_S)
            if max(most + debt.sum * PERIOD_S / debt.limit, debt.floor) > now:
                seen_us, floor_us = (until - now) * 1e6, (debt.floor - now) * 1e6
                yield Spending(name, debt.limit, seen_us, debt.sum, floor_us)
