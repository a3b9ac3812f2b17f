"""Limits on keys, tenants and the server, decided at once and settled once.

Everything here runs on the event loop's thread between two awaits, so that a decision over key, tenant and server is
one step: it takes from all of them or from none. How a rate is kept stands in `gcra`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.gcra import PERIOD_S, RateWindow
from loraplex.control.types import NO_LIMITS, Limits, LimitWindow, Principal, Reservation

CONCURRENCY_RETRY_S = 1.0
"""When a place becomes free cannot be known; a second is a polite guess."""
SWEEP_EVERY = 4096
"""Decisions between two looks for limits that have flowed back wholly."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """One owner of limits: ("key", id), ("tenant", id) or ("server", "")."""

    kind: str
    owner: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class _Charge:
    """What one window is charged. `what` is "requests" or "tokens"."""

    scope: str
    what: str
    window: RateWindow
    limit: int
    cost: int

    @property
    def seconds(self) -> float:
        """The charge as a share of the period."""
        return self.cost * PERIOD_S / self.limit

    def state(self, now: float) -> LimitWindow:
        spent = self.window.spent(now)
        return LimitWindow(self.limit, int((PERIOD_S - spent) * self.limit / PERIOD_S + 1e-6), spent)


@dataclass(frozen=True, slots=True)
class _Live:
    """A reservation that is not settled: what came from where."""

    scopes: tuple[_Scope, ...]
    tokens: tuple[_Charge, ...]
    reserved: int


class InProcessLimiter:
    """The limits of one server process. `clock` is monotonic seconds; `server` are limits over all tenants."""

    def __init__(self, *, server: Limits = NO_LIMITS, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._windows: dict[tuple[str, str, str], RateWindow] = {}
        self._running: dict[tuple[str, str], int] = {}
        self._live: dict[str, _Live] = {}
        self._decisions = 0

    async def reserve(
        self,
        principal: Principal,
        *,
        prompt_tokens: int,
        asked_tokens: int | None,
        default_tokens: int,
        n: int,
    ) -> Reservation:
        """Take one request and `prompt_tokens` + n outputs from every limit there is, or nothing.

        `asked_tokens` is what the request asks for an output; None takes `default_tokens`, or what the limits
        allow if that is less. The reservation's `max_output_tokens` is what was reserved for each output and must
        not be exceeded. `prompt_tokens` counts all prompts once.

        Raises NeverFits for what no wait would make fit, RateLimited for what a wait would.
        """
        now = self._clock()
        scopes = self._scopes(principal)
        output = _output_tokens(scopes, prompt_tokens, asked_tokens, default_tokens, n)
        tokens = prompt_tokens + n * output
        charges = [
            *self._charges(scopes, "requests", lambda limits: limits.requests_per_minute, 1),
            *self._charges(scopes, "tokens", lambda limits: limits.tokens_per_minute, tokens),
        ]
        refusals = [*_refused_by_rate(charges, now), *self._refused_by_concurrency(scopes)]
        if refusals:
            wait, message = max(refusals)
            raise RateLimited(
                message,
                retry_after_s=wait,
                requests=_tightest(charges, "requests", now),
                tokens=_tightest(charges, "tokens", now),
            )
        reservation_id = uuid.uuid4().hex
        for charge in charges:
            held_as = reservation_id if charge.what == "tokens" else None
            charge.window.charge(charge.seconds, now, held_as)
        for scope in scopes:
            where = (scope.kind, scope.owner)
            self._running[where] = self._running.get(where, 0) + 1
        of_tokens = tuple(charge for charge in charges if charge.what == "tokens")
        self._live[reservation_id] = _Live(scopes, of_tokens, tokens)
        self._sweep(now)
        return Reservation(
            reservation_id,
            requests=_tightest(charges, "requests", now),
            tokens=_tightest(charges, "tokens", now),
            max_output_tokens=output,
        )

    async def settle(self, reservation: Reservation, *, used_tokens: int) -> None:
        """Give back what was reserved and not used, and the request's place. A second time it does nothing."""
        live = self._live.pop(reservation.reservation_id, None)
        if live is None:
            return
        unused = max(0, live.reserved - used_tokens)
        for charge in live.tokens:
            charge.window.give_back(reservation.reservation_id, unused * PERIOD_S / charge.limit)
        for scope in live.scopes:
            where = (scope.kind, scope.owner)
            self._running[where] -= 1
            if not self._running[where]:
                del self._running[where]

    @property
    def num_live(self) -> int:
        """Reservations that are not settled."""
        return len(self._live)

    @property
    def num_tracked(self) -> int:
        """Windows and counters in memory."""
        return len(self._windows) + len(self._running)

    def _scopes(self, principal: Principal) -> tuple[_Scope, ...]:
        return (
            _Scope("key", principal.key_id or "", principal.key_limits),
            _Scope("tenant", principal.tenant_id or "", principal.tenant_limits),
            _Scope("server", "", self._server),
        )

    def _charges(
        self, scopes: tuple[_Scope, ...], what: str, limit_of: Callable[[Limits], int | None], cost: int
    ) -> Iterator[_Charge]:
        for scope in scopes:
            limit = limit_of(scope.limits)
            if limit is not None:
                window = self._windows.setdefault((scope.kind, scope.owner, what), RateWindow())
                yield _Charge(scope.kind, what, window, limit, cost)

    def _refused_by_concurrency(self, scopes: tuple[_Scope, ...]) -> Iterator[tuple[float, str]]:
        for scope in scopes:
            most = scope.limits.max_concurrency
            if most is not None and self._running.get((scope.kind, scope.owner), 0) >= most:
                message = f"The {scope.kind}'s limit of {most} requests at a time is reached."
                yield CONCURRENCY_RETRY_S, message

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._windows = {
                name: window for name, window in self._windows.items() if not window.is_idle(now)
            }


def _refused_by_rate(charges: list[_Charge], now: float) -> Iterator[tuple[float, str]]:
    for charge in charges:
        wait = charge.window.wait(charge.seconds, now)
        if wait > 0:
            yield wait, f"The {charge.scope}'s limit of {charge.limit} {charge.what} a minute is reached."


def _tightest(charges: list[_Charge], what: str, now: float) -> LimitWindow | None:
    states = [charge.state(now) for charge in charges if charge.what == what]
    return min(states, key=lambda state: state.remaining, default=None)


def _output_tokens(
    scopes: tuple[_Scope, ...], prompt_tokens: int, asked: int | None, default: int, n: int
) -> int:
    """Tokens for each output: what was asked, or the default as far as the limits allow it."""
    output = default if asked is None else asked
    for scope in scopes:
        most = scope.limits.max_output_tokens
        if most is not None and output > most:
            if asked is not None:
                raise NeverFits(
                    f"{asked} output tokens were asked for; the {scope.kind}'s limit is {most}.",
                    param="max_tokens",
                )
            output = most
        rate = scope.limits.tokens_per_minute
        if rate is None:
            continue
        room = (rate - prompt_tokens) // n
        if room < 1:
            raise NeverFits(
                f"The prompt has {prompt_tokens} tokens; the {scope.kind}'s limit of {rate} tokens a minute can "
                "never hold it and an answer.",
                param="messages",
            )
        if output > room:
            if asked is not None:
                raise NeverFits(
                    f"{prompt_tokens} prompt tokens and {n} × {asked} output tokens can never fit the "
                    f"{scope.kind}'s limit of {rate} tokens a minute.",
                    param="max_tokens",
                )
            output = room
    return output
