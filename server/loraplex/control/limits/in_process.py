"""The limits of one server process, in memory.

Everything here runs on the event loop's thread between two awaits, so that a decision over key, tenant and server is
one step. How a rate is kept stands in `gcra`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.control.errors import RateLimited
from loraplex.control.limits.gcra import PERIOD_S, RateWindow
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, Owner, RateCharge, What
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
        self._windows: dict[tuple[Owner, What], RateWindow] = {}
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
            raise limited(refusals, _decision(plan, windows, now))
        for charge, window in zip(plan.rates, windows, strict=True):
            window.charge(charge.seconds, now, request_id)
        self._running.add_running(plan)
        decision = _decision(plan, windows, now)
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

    @property
    def num_tracked(self) -> int:
        """Windows and counters in memory."""
        return len(self._windows) + len(self._running)

    def _window(self, charge: RateCharge) -> RateWindow:
        return self._windows.setdefault((charge.owner, charge.what), RateWindow())

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }


class Running:
    """How many requests, and how many of their sequences, each owner has running."""

    def __init__(self) -> None:
        self._counts: dict[Owner, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def requests(self, owner: Owner) -> int:
        return self._counts.get(owner, (0, 0))[0]

    def sequences(self, owner: Owner) -> int:
        return self._counts.get(owner, (0, 0))[1]

    def add_running(self, plan: LimitPlan) -> None:
        for place in plan.places:
            requests, sequences = self._counts.get(place.owner, (0, 0))
            self._counts[place.owner] = (requests + 1, sequences + plan.sequences)

    def remove_running(self, plan: LimitPlan) -> None:
        """Remove a plan that was added."""
        for place in plan.places:
            requests, sequences = self._counts.pop(place.owner)
            if requests > 1:
                self._counts[place.owner] = (requests - 1, sequences - plan.sequences)


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
        requests=decision.requests,
        tokens=decision.tokens,
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
        if place.limit is not None and running.requests(place.owner) >= place.limit:
            yield LimitRefusal(PLACE_RETRY_S, place.refusal, place.reached("concurrency"))
        most = place.max_sequences
        if most is not None and running.sequences(place.owner) + plan.sequences > most:
            yield LimitRefusal(PLACE_RETRY_S, place.sequences_refusal, place.reached("sequences"))


def _decision(plan: LimitPlan, windows: Iterable[RateWindow], now: float) -> Decision:
    """The decision with the window of each kind that has the least left."""
    tightest: dict[What, LimitWindow] = {}
    again = 0.0
    for charge, window in zip(plan.rates, windows, strict=True):
        state = limit_window(charge.limit, window.spent(now))
        if charge.what not in tightest or state.remaining < tightest[charge.what].remaining:
            tightest[charge.what] = state
        again = max(again, window.wait(charge.seconds, now))
    return Decision(tightest.get("requests"), tightest.get("tokens"), again)


def limit_window(limit: int, spent_s: float) -> LimitWindow:
    """A rate with `spent_s` seconds of the period spent."""
    return LimitWindow(limit, int((PERIOD_S - spent_s) * limit / PERIOD_S + 1e-6), spent_s)
