"""The limits of one server process, in memory.

Everything here runs on the event loop's thread between two awaits, so that a decision over key, tenant and server is
one step. How a rate is kept stands in `gcra`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.control.errors import RateLimited
from loraplex.control.limits.gcra import PERIOD_S, RateWindow
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, Owner, RateCharge
from loraplex.control.types import Decision, LimitWindow, ReachedLimit

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
        self._windows: dict[tuple[Owner, str], RateWindow] = {}
        self._running = Running()
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
        refusals = [*_refused_rates(plan, windows, now), *_refused_places(plan, self._running)]
        if refusals:
            raise limited(refusals, decide(plan, windows, now))
        for charge, window in zip(plan.rates, windows, strict=True):
            window.charge(charge.seconds, now, request_id)
        self._running.add_running(plan)
        decision = decide(plan, windows, now)
        self._live[request_id] = _Live(plan, windows, decision)
        self._sweep(now)
        return decision

    async def settle(self, *request_ids: str, used_tokens: int | None) -> None:
        for request_id in request_ids:
            self._settle(request_id, used_tokens)

    def _settle(self, request_id: str, used_tokens: int | None) -> None:
        live = self._live.pop(request_id, None)
        if live is None:
            return
        for charge, window in zip(live.plan.rates, live.windows, strict=True):
            unused = charge.cost - charge.kept(used_tokens)
            window.give_back(request_id, unused * PERIOD_S / charge.limit)
        self._running.remove_running(live.plan)

    def warning(self) -> None:
        return None

    async def close(self) -> None:
        """Nothing outlives the process."""

    @property
    def num_live(self) -> int:
        """Reservations that are not settled."""
        return len(self._live)

    def _window(self, charge: RateCharge) -> RateWindow:
        return self._windows.setdefault((charge.owner, charge.what), RateWindow())

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }


class Running:
    """How much of each of PLACES each owner has at a time."""

    def __init__(self) -> None:
        self._counts: dict[Owner, Counter[str]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, owner: Owner, what: str) -> int:
        return self._counts[owner][what] if owner in self._counts else 0

    def add_running(self, plan: LimitPlan) -> None:
        for place in plan.places:
            self._counts.setdefault(place.owner, Counter()).update(plan.held)

    def remove_running(self, plan: LimitPlan) -> None:
        """Remove a plan that was added."""
        for place in plan.places:
            counts = self._counts[place.owner]
            counts.subtract(plan.held)
            if not any(counts.values()):
                del self._counts[place.owner]


class LimitRefusal(NamedTuple):
    """A limit that is reached: for how long, and which it is."""

    wait_s: float
    message: str
    reached: ReachedLimit


def limited(refusals: Sequence[LimitRefusal], decision: Decision) -> RateLimited:
    """The answer to a plan that these limits refuse, with the longest wait."""
    longest = max(refusals, key=lambda refusal: (refusal.wait_s, refusal.message))
    return RateLimited(
        longest.message,
        retry_after_s=longest.wait_s,
        windows=decision.windows,
        is_own=longest.reached.owner != "server",
        reached=longest.reached,
    )


def _refused_rates(plan: LimitPlan, windows: Iterable[RateWindow], now: float) -> Iterator[LimitRefusal]:
    for charge, window in zip(plan.rates, windows, strict=True):
        wait = window.wait(charge.seconds, now)
        if wait > 0:
            yield LimitRefusal(wait, charge.refusal, charge.reached)


def _refused_places(plan: LimitPlan, running: Running) -> Iterator[LimitRefusal]:
    for place in plan.places:
        for what, most in place.limits.items():
            if most is not None and running.count(place.owner, what) + plan.held[what] > most:
                yield LimitRefusal(PLACE_RETRY_S, place.refusal(what), place.reached(what))


def decide(plan: LimitPlan, windows: Iterable[RateWindow], now: float) -> Decision:
    pairs = list(zip(plan.rates, windows, strict=True))
    again_s = max((window.wait(charge.seconds, now) for charge, window in pairs), default=0.0)
    states = (limit_window(charge.limit, window.spent(now)) for charge, window in pairs)
    return Decision(tightest(plan, states), again_s)


def tightest(plan: LimitPlan, states: Iterable[LimitWindow]) -> dict[str, LimitWindow]:
    """The state with the least left of each kind, of `states` in the order of the plan's rates."""
    found: dict[str, LimitWindow] = {}
    for charge, state in zip(plan.rates, states, strict=True):
        if charge.what not in found or state.remaining < found[charge.what].remaining:
            found[charge.what] = state
    return found


def limit_window(limit: int, spent_s: float) -> LimitWindow:
    """A rate with `spent_s` seconds of the period spent."""
    return LimitWindow(limit, int((PERIOD_S - spent_s) * limit / PERIOD_S + 1e-6), spent_s)
