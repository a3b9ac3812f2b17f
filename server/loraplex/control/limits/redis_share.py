"""A server's own share of each limit while Redis is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from loraplex.control.errors import LimitsUnavailable
from loraplex.control.limits.gcra import PERIOD_S, RateWindow
from loraplex.control.limits.in_process import Running, limit_window, tightest
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, RateCharge
from loraplex.control.limits.redis_messages import window_name
from loraplex.control.limits.redis_owed import Seen
from loraplex.control.types import Decision, LimitWindow

SWEEP_FROM = 4096
"""Windows, before those that have flowed back are forgotten."""


class LocalShare:
    """Decisions of one server over the `parts`-th part of each limit, from what it saw of each window in Redis: what
    was left then divides among the servers, and so does what flows back.

    A request larger than the share passes when the share is whole, and is paid for before the next one. `clock` is
    monotonic seconds.
    """

    def __init__(self, parts: int, seen: Mapping[str, Seen], clock: Callable[[], float]) -> None:
        self._parts = parts
        self._seen = seen
        self._clock = clock
        self._windows: dict[str, RateWindow] = {}
        self._sweep_at = SWEEP_FROM
        self._held: dict[str, list[tuple[RateCharge, RateWindow]]] = {}

    def reserve(self, request_id: str, plan: LimitPlan, running: Running) -> Decision:
        """Take the plan from this server's part of all its limits, or nothing. `running`: what this server has running
        by now, and counts itself. Raises LimitsUnavailable."""
        now = self._clock()
        windows = [self._window(charge, now) for charge in plan.rates]
        refusals = [
            (wait, charge.refusal)
            for charge, window in zip(plan.rates, windows, strict=True)
            if (wait := self._wait(charge, window, now))
        ]
        refusals.extend((PLACE_RETRY_S, reached) for reached in self._refused_places(plan, running))
        if refusals:
            wait, reached = max(refusals)
            raise LimitsUnavailable(reached, retry_after_s=wait)
        for charge, window in zip(plan.rates, windows, strict=True):
            window.charge(charge.seconds * self._parts, now, request_id)
        self._held[request_id] = list(zip(plan.rates, windows, strict=True))
        self._sweep(now)
        return self._decision(plan, windows, now)

    def settle(self, request_id: str, used_tokens: int | None) -> None:
        for charge, window in self._held.pop(request_id, ()):
            unused = charge.cost - charge.kept(used_tokens)
            window.give_back(request_id, unused * self._parts * PERIOD_S / charge.limit)

    def _window(self, charge: RateCharge, now: float) -> RateWindow:
        name = window_name(charge)
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = RateWindow()
            if name in self._seen:
                window.charge(min(max(0.0, self._seen[name].until - now), PERIOD_S), now)
        return window

    def _wait(self, charge: RateCharge, window: RateWindow, now: float) -> float:
        return window.wait(min(charge.seconds * self._parts, PERIOD_S), now)

    def _refused_places(self, plan: LimitPlan, running: Running) -> Iterator[str]:
        """Limits of places that refuse the plan. A request of any number of sequences is let through if nothing else
        runs."""
        for place in plan.places:
            for what, most in place.limits.items():
                here = running.count(place.owner, what)
                if most is not None and here and here + plan.held[what] > most // self._parts:
                    yield place.refusal(what)

    def _decision(self, plan: LimitPlan, windows: list[RateWindow], now: float) -> Decision:
        pairs = list(zip(plan.rates, windows, strict=True))
        whole = [limit_window(charge.limit, window.spent(now)) for charge, window in pairs]
        here = (LimitWindow(each.limit, each.remaining // self._parts, each.reset_s) for each in whole)
        again_s = max((self._wait(charge, window, now) for charge, window in pairs), default=0.0)
        return Decision(tightest(plan, here), again_s)

    def _sweep(self, now: float) -> None:
        if len(self._windows) > self._sweep_at:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }
            self._sweep_at = 2 * len(self._windows) + SWEEP_FROM
