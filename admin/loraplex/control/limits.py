"""Limits on keys, tenants and the server, decided at once and settled once.

Rates are kept by GCRA, the "virtual scheduling" form of the leaky bucket (ITU-T I.371): one number a limit, the
theoretical arrival time (TAT), says how much of its minute is spent. A full minute's worth may come at once; what is
spent flows back evenly. Everything here runs on the event loop's thread between two awaits, so that a decision over
key, tenant and server is one step: it takes from all of them or from none.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loraplex.control.errors import NeverFits, RateLimited
from loraplex.control.types import NO_LIMITS, Limits, LimitWindow, Principal, Reservation

PERIOD_S = 60.0
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
    """What one window would be charged. `seconds` is the share of the period."""

    window: tuple[str, str, str]
    limit: int
    cost: int

    @property
    def seconds(self) -> float:
        return self.cost * PERIOD_S / self.limit


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
        self._tat: dict[tuple[str, str, str], float] = {}
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
            *_charges(scopes, "requests", lambda limits: limits.requests_per_minute, 1),
            *_charges(scopes, "tokens", lambda limits: limits.tokens_per_minute, tokens),
        ]
        self._check_concurrency(scopes)
        waits = [(self._wait(charge, now), charge) for charge in charges]
        worst, charge = max(waits, key=lambda pair: pair[0], default=(0.0, None))
        if worst > 0 and charge is not None:
            raise RateLimited(
                f"The {charge.window[0]}'s limit of {charge.limit} {charge.window[2]} a minute is reached.",
                retry_after_s=worst,
                requests=self._tightest(charges, "requests", now),
                tokens=self._tightest(charges, "tokens", now),
            )
        for charge in charges:
            self._tat[charge.window] = max(self._tat.get(charge.window, now), now) + charge.seconds
        for scope in scopes:
            where = (scope.kind, scope.owner)
            self._running[where] = self._running.get(where, 0) + 1
        reservation_id = uuid.uuid4().hex
        of_tokens = tuple(charge for charge in charges if charge.window[2] == "tokens")
        self._live[reservation_id] = _Live(scopes, of_tokens, tokens)
        self._sweep(now)
        return Reservation(
            reservation_id,
            requests=self._tightest(charges, "requests", now),
            tokens=self._tightest(charges, "tokens", now),
            max_output_tokens=output,
        )

    async def settle(self, reservation: Reservation, *, used_tokens: int) -> None:
        """Give back what was reserved and not used, and the request's place. A second time it does nothing."""
        live = self._live.pop(reservation.reservation_id, None)
        if live is None:
            return
        unused = max(0, live.reserved - used_tokens)
        for charge in live.tokens:
            if charge.window in self._tat:
                self._tat[charge.window] -= unused * PERIOD_S / charge.limit
        for scope in live.scopes:
            where = (scope.kind, scope.owner)
            self._running[where] -= 1
            if not self._running[where]:
                del self._running[where]

    @property
    def num_live(self) -> int:
        """Reservations that are not settled."""
        return len(self._live)

    def _scopes(self, principal: Principal) -> tuple[_Scope, ...]:
        return (
            _Scope("key", principal.key_id or "", principal.key_limits),
            _Scope("tenant", principal.tenant_id or "", principal.tenant_limits),
            _Scope("server", "", self._server),
        )

    def _check_concurrency(self, scopes: tuple[_Scope, ...]) -> None:
        for scope in scopes:
            most = scope.limits.max_concurrency
            if most is not None and self._running.get((scope.kind, scope.owner), 0) >= most:
                raise RateLimited(
                    f"The {scope.kind}'s limit of {most} requests at a time is reached.",
                    retry_after_s=CONCURRENCY_RETRY_S,
                )

    def _spent(self, window: tuple[str, str, str], now: float) -> float:
        """Seconds of the period that are spent now."""
        return max(0.0, self._tat.get(window, now) - now)

    def _wait(self, charge: _Charge, now: float) -> float:
        """Seconds until this charge would pass; 0 if it passes now."""
        over = self._spent(charge.window, now) + charge.seconds - PERIOD_S
        # Sums of floats: a billionth of the period is not worth a refusal.
        return over if over > PERIOD_S * 1e-9 else 0.0

    def _tightest(self, charges: list[_Charge], kind: str, now: float) -> LimitWindow | None:
        windows = [
            LimitWindow(charge.limit, int((PERIOD_S - spent) * charge.limit / PERIOD_S + 1e-6), spent)
            for charge in charges
            if charge.window[2] == kind
            for spent in [min(self._spent(charge.window, now), PERIOD_S)]
        ]
        return min(windows, key=lambda window: window.remaining, default=None)

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._tat = {window: tat for window, tat in self._tat.items() if tat > now}


def _charges(
    scopes: tuple[_Scope, ...], kind: str, limit_of: Callable[[Limits], int | None], cost: int
) -> Iterator[_Charge]:
    for scope in scopes:
        limit = limit_of(scope.limits)
        if limit is not None:
            yield _Charge((scope.kind, scope.owner, kind), limit, cost)


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
