"""What a server may spend of each limit by itself while Redis is away."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.control.errors import LimitsUnavailable
from loraplex.control.limits.gcra import PERIOD_S, RateWindow
from loraplex.control.limits.in_process import Running, limit_window
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, RateCharge, What
from loraplex.control.limits.redis_messages import Spending, owner_name, window_name
from loraplex.control.types import Decision, LimitWindow

SWEEP_FROM = 4096
"""Windows, before those that have flowed back are forgotten."""
PERIOD_US = PERIOD_S * 1e6
LATE_RETRY_S = 1.0
"""Before a share begins: most times Redis was only late."""
TOO_LARGE_RETRY_S = 5.0
"""What is more than the whole share has to wait for Redis, and nobody knows how long."""


class Seen(NamedTuple):
    """What was last seen of a window in Redis: spent `until` then, in microseconds of its clock."""

    limit: int
    until: float


@dataclass(frozen=True, slots=True)
class Part:
    """One of `replicas` servers, of which `rank` come before it."""

    replicas: int
    rank: int

    def of(self, limit: int, name: str) -> int:
        """This server's part of a limit in whole units; those of all servers add up to the limit. What does not divide
        goes to some of them, for each name to others."""
        whole, left = divmod(limit, self.replicas)
        return whole + ((self.rank + zlib.crc32(name.encode())) % self.replicas < left)


class LocalShare:
    """Decisions of one server over its part of each limit. All windows are spent when it `begins_at`, and flow back
    from then on: Redis keeps just that back from the others. `clock` is monotonic seconds."""

    def __init__(self, part: Part, begins_at: float, clock: Callable[[], float]) -> None:
        self._part = part
        self._begins_at = begins_at
        self._clock = clock
        self._windows: dict[str, RateWindow] = {}
        self._sweep_at = SWEEP_FROM
        self._held: dict[str, list[tuple[RateCharge, RateWindow, float]]] = {}

    @property
    def has_begun(self) -> bool:
        return self._clock() >= self._begins_at

    def reserve(self, request_id: str, plan: LimitPlan, running: Running) -> Decision:
        """Take the plan from this server's part of all its limits, or nothing. `running`: what this server has running
        by now, and counts itself. Raises LimitsUnavailable."""
        now = self._clock()
        shares = [self._part.of(charge.limit, window_name(charge)) for charge in plan.rates]
        windows = [self._window(charge, now) for charge in plan.rates]
        refusals = [
            *_refused_rates(plan, shares, windows, now),
            *self._refused_places(plan, running),
        ]
        if refusals:
            wait, reached = max(refusals)
            if not self.has_begun:
                wait = min(wait, LATE_RETRY_S)
            raise LimitsUnavailable(reached, retry_after_s=wait)
        held = []
        for charge, share, window in zip(plan.rates, shares, windows, strict=True):
            unit = PERIOD_S / share
            window.charge(charge.cost * unit, now, request_id)
            held.append((charge, window, unit))
        self._held[request_id] = held
        if len(self._windows) > self._sweep_at:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }
            self._sweep_at = 2 * len(self._windows) + SWEEP_FROM
        return self._decision(plan, shares, windows, now)

    def settle(self, request_id: str, used_tokens: int | None) -> None:
        for charge, window, unit in self._held.pop(request_id, ()):
            window.give_back(request_id, (charge.cost - kept_cost(charge, used_tokens)) * unit)

    def _window(self, charge: RateCharge, now: float) -> RateWindow:
        name = window_name(charge)
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = RateWindow()
            window.charge(max(0.0, self._begins_at + PERIOD_S - now), now)
        return window

    def _refused_places(self, plan: LimitPlan, running: Running) -> Iterator[tuple[float, str]]:
        for place in plan.places:
            if place.limit is not None:
                share = self._part.of(place.limit, owner_name(place.owner))
                if running.requests(place.owner) >= share:
                    yield PLACE_RETRY_S, place.refusal
            if place.max_sequences is not None:
                share = self._part.of(place.max_sequences, owner_name(place.owner))
                if plan.sequences > share:
                    yield TOO_LARGE_RETRY_S, place.sequences_refusal
                elif running.sequences(place.owner) + plan.sequences > share:
                    yield PLACE_RETRY_S, place.sequences_refusal

    @staticmethod
    def _decision(plan: LimitPlan, shares: list[int], windows: list[RateWindow], now: float) -> Decision:
        tightest: dict[What, LimitWindow] = {}
        again = 0.0
        for charge, share, window in zip(plan.rates, shares, windows, strict=True):
            again = max(again, window.wait(charge.cost * PERIOD_S / share, now))
            here = limit_window(share, window.spent(now))
            if charge.what not in tightest or here.remaining < tightest[charge.what].remaining:
                tightest[charge.what] = LimitWindow(charge.limit, here.remaining, here.reset_s)
        return Decision(tightest.get("requests"), tightest.get("tokens"), again)


def kept_cost(charge: RateCharge, used_tokens: int | None) -> int:
    """What stays of a charge when its request has ended."""
    if used_tokens is None:
        return 0
    return charge.cost if charge.what == "requests" else min(used_tokens, charge.cost)


def _refused_rates(
    plan: LimitPlan, shares: list[int], windows: list[RateWindow], now: float
) -> Iterator[tuple[float, str]]:
    for charge, share, window in zip(plan.rates, shares, windows, strict=True):
        if charge.cost > share:
            yield TOO_LARGE_RETRY_S, charge.refusal
        elif wait := window.wait(charge.cost * PERIOD_S / share, now):
            yield wait, charge.refusal


@dataclass(slots=True)
class _Debt:
    limit: int
    sum: float
    floor: float


class Owed:
    """What was spent without Redis and has ended: for each window, as one function of the theoretical arrival time
    (see `gcra`), so that it is as short after an hour as after a second."""

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def __len__(self) -> int:
        return len(self._debts)

    def add(self, plan: LimitPlan, used_tokens: int | None, at_us: float) -> None:
        """A request that was let pass `at_us`. Those that began later and ended earlier count as if they had come
        before it, which is never less than it was."""
        for charge in plan.rates:
            self._add(window_name(charge), charge.limit, kept_cost(charge, used_tokens), at_us)

    def merge(self, later: Owed) -> None:
        for name, debt in later._debts.items():
            mine = self._debts.setdefault(name, _Debt(debt.limit, 0.0, 0.0))
            mine.limit, mine.sum = debt.limit, mine.sum + debt.sum
            mine.floor = max(mine.floor + debt.sum * PERIOD_US / debt.limit, debt.floor)

    def spending(self, seen: Mapping[str, Seen], now_us: float, lost_us: float) -> list[Spending]:
        """Together with what was last seen in Redis, as far as it still makes a difference now: no window there was
        spent for more than a minute beyond `lost_us`."""
        told = []
        # What was charged here was charged after the loss: a window that was less spent by then makes no difference.
        for name in {**dict.fromkeys(seen), **dict.fromkeys(self._debts)}:
            limit, until = seen.get(name, (0, 0.0))
            debt = self._debts.get(name) or _Debt(limit, 0.0, 0.0)
            sum_us = debt.sum * PERIOD_US / debt.limit
            most = until if not debt.sum else max(until, lost_us + PERIOD_US)
            if max(most + sum_us, debt.floor) > now_us:
                seen_us = max(until, lost_us) if debt.sum else until
                told.append(Spending(name, debt.limit, seen_us, debt.sum, debt.floor))
        return told

    def _add(self, name: str, limit: int, cost: int, at_us: float) -> None:
        debt = self._debts.setdefault(name, _Debt(limit, 0.0, 0.0))
        debt.limit, debt.sum = limit, debt.sum + cost
        debt.floor = max(debt.floor, at_us) + cost * PERIOD_US / limit
