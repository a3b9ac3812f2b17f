"""The limits of one server process, in memory.

Everything here runs on the event loop's thread between two awaits, so that a decision over key, tenant and server is
one step. How a rate is kept stands in `gcra`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from loraplex.control.errors import RateLimited
from loraplex.control.limits.gcra import PERIOD_S, RateWindow
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, Owner, RateCharge, What
from loraplex.control.types import Decision, LimitWindow

SWEEP_EVERY = 4096
"""Decisions between two looks for limits that have flowed back wholly."""


@dataclass(frozen=True, slots=True)
class _Live:
    """A reservation that is not settled: what came from where."""

    plan: LimitPlan
    windows: tuple[RateWindow, ...]
    decision: Decision


class InProcessLimiter:
    """See `Limiter`. `clock` is monotonic seconds."""

    name = "in-process"

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[tuple[Owner, What], RateWindow] = {}
        self._running: dict[Owner, int] = {}
        self._live: dict[str, _Live] = {}
        self._decisions = 0

    async def start(self) -> None:
        """There is nothing to be opened."""

    async def reserve(self, request_id: str, plan: LimitPlan) -> Decision:
        known = self._live.get(request_id)
        if known is not None:
            return known.decision
        now = self._clock()
        windows = tuple(self._window(charge) for charge in plan.rates)
        refusals = [*_refused_rates(plan, windows, now), *self._refused_places(plan)]
        if refusals:
            wait, message = max(refusals)
            decision = _decision(plan, windows, now)
            raise RateLimited(message, retry_after_s=wait, requests=decision.requests, tokens=decision.tokens)
        for charge, window in zip(plan.rates, windows, strict=True):
            window.charge(charge.seconds, now, request_id)
        for place in plan.places:
            self._running[place.owner] = self._running.get(place.owner, 0) + 1
        decision = _decision(plan, windows, now)
        self._live[request_id] = _Live(plan, windows, decision)
        self._sweep(now)
        return decision

    async def settle(self, request_id: str, *, used_tokens: int | None) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        for charge, window in zip(live.plan.rates, live.windows, strict=True):
            used = charge.cost if charge.what == "requests" else min(used_tokens or 0, charge.cost)
            unused = charge.cost if used_tokens is None else charge.cost - used
            window.give_back(request_id, unused * PERIOD_S / charge.limit)
        for place in live.plan.places:
            self._running[place.owner] -= 1
            if not self._running[place.owner]:
                del self._running[place.owner]

    async def close(self) -> None:
        """Nothing outlives the process."""

    @property
    def num_live(self) -> int:
        """Reservations that are not settled."""
        return len(self._live)

    @property
    def num_tracked(self) -> int:
        """Windows and counters in memory."""
        return len(self._windows) + len(self._running)

    def _window(self, charge: RateCharge) -> RateWindow:
        return self._windows.setdefault((charge.owner, charge.what), RateWindow())

    def _refused_places(self, plan: LimitPlan) -> Iterator[tuple[float, str]]:
        for place in plan.places:
            if place.limit is not None and self._running.get(place.owner, 0) >= place.limit:
                yield PLACE_RETRY_S, place.refusal

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }


def _refused_rates(plan: LimitPlan, windows: Iterable[RateWindow], now: float) -> Iterator[tuple[float, str]]:
    for charge, window in zip(plan.rates, windows, strict=True):
        wait = window.wait(charge.seconds, now)
        if wait > 0:
            yield wait, charge.refusal


def _decision(plan: LimitPlan, windows: Iterable[RateWindow], now: float) -> Decision:
    """Of each kind the window with the least left."""
    tightest: dict[What, LimitWindow] = {}
    for charge, window in zip(plan.rates, windows, strict=True):
        state = limit_window(charge.limit, window.spent(now))
        if charge.what not in tightest or state.remaining < tightest[charge.what].remaining:
            tightest[charge.what] = state
    return Decision(tightest.get("requests"), tightest.get("tokens"))


def limit_window(limit: int, spent_s: float) -> LimitWindow:
    """A rate of which so many seconds of the period are spent."""
    return LimitWindow(limit, int((PERIOD_S - spent_s) * limit / PERIOD_S + 1e-6), spent_s)
