"""The limits of all servers together, in one Redis; and what a server does while it is away.

A decision is one call of a Lua script (`redis_limiter.lua`), which sees every limit at one moment. It has 50 ms. When
an answer is late or bad, this server is *apart*: it decides as the operator chose (`WhenApart`), and looks for Redis in
the background. When Redis is back, it gets what was spent meanwhile, and once more what it may have lost; only then
does it decide again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from loraplex.control.background import BackgroundTasks
from loraplex.control.errors import LimitsNotShared, LimitsUnavailable
from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.limits.in_process import LimitRefusal, Running, limit_window, limited, tightest
from loraplex.control.limits.limiter import PLACE_RETRY_S, WhenApart
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_link import LinkDown, RedisLink
from loraplex.control.limits.redis_messages import (
    Beat,
    Join,
    Reply,
    Request,
    Reserve,
    Settle,
    Spending,
    Tell,
    rates_of,
    seats_of,
    window_name,
)
from loraplex.control.limits.redis_owed import Owed, Seen
from loraplex.control.limits.redis_session import RedisSession
from loraplex.control.limits.redis_share import LocalShare
from loraplex.control.types import Decision

TIMEOUT_S = 0.05
"""Longest time for a call that a request waits for."""
PATIENCE_S = 0.5
"""Longest time for a call in the background."""
HEARTBEAT_S = 0.25
"""A replica that Redis has not heard of for 15 s (LEASE in the script) has given back what it held."""
RETRY_S = (0.0, 0.02, 0.05, 0.1)
"""Pauses before Redis is tried again; the last one repeats."""
UNDECIDED_RETRY_S = 1.0
"""Where nothing is decided without Redis: most times it was only late."""
MOST_TOLD = 500
"""Windows that one call reports: it may not delay others for long."""
SWEEP_EVERY = 4096
log = structlog.get_logger("loraplex")


class LimiterWatch(Protocol):
    """Measurements of the limiter."""

    def redis_answered(self, seconds: float) -> None:
        """A decision came from Redis."""

    def decided_apart(self, passed: bool) -> None:
        """A decision was made without it."""

    def redis_up(self, up: bool, replicas: int) -> None:
        """Decisions come from Redis, or not; `replicas` that live, as last heard."""

    def redis_lost_data(self) -> None:
        """Redis came back without data that this server had sent it."""


@dataclass(slots=True)
class _Live:
    """A reservation that has not ended. `at`: when it was made, by this server's clock. `told`: Redis knows of it."""

    plan: LimitPlan
    decision: Decision
    at: float
    told: bool


class RedisLimiter:
    """See `Limiter`. `start` before the first decision. `clock` is monotonic seconds.

    `reserve` also raises LimitsUnavailable. `settle` raises nothing: reports that fail now are sent later.
    """

    name = "redis"

    def __init__(
        self,
        link: RedisLink,
        watch: LimiterWatch,
        *,
        when_apart: WhenApart = "share",
        clock: Callable[[], float] = time.monotonic,
        background: BackgroundTasks | None = None,
    ) -> None:
        self._link = link
        self._session = RedisSession(link, clock)
        self._watch = watch
        self._when_apart = when_apart
        self._clock = clock
        self._background = background or BackgroundTasks()
        self._joined = False
        self._lost = asyncio.Event()
        self._lost_at = 0.0
        self._share: LocalShare | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._asked: set[str] = set()
        self._live: dict[str, _Live] = {}
        self._running = Running()
        self._seen: dict[str, Seen] = {}
        self._owed = Owed()
        # What Redis may have already, from a call whose answer was lost; it has a number.
        self._telling = Owed()
        self._batch = 0
        self._ended: dict[str, int] = {}
        self._decisions = 0

    async def start(self) -> None:
        """Raises LimitsNotShared where Redis cannot be used at the start."""
        try:
            await self._link.connect()
            await self._join()
        except LinkDown as error:
            raise LimitsNotShared(f"the Redis of the limits cannot be used: {error}.") from error
        self._back()
        self._keeper = self._background.start("limiter-redis", self._keep)

    def warning(self) -> str | None:
        if self._joined:
            return None
        return (
            f"the Redis of the limits has not been reached for {self._clock() - self._lost_at:.0f} s; each server "
            f"decides by itself (--limits-when-apart {self._when_apart})"
        )

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._joined:
            with contextlib.suppress(LinkDown):
                await self._session.call("leave", Beat(self._session.caller()), PATIENCE_S)
        await self._link.close()

    async def reserve(self, request_id: str, plan: LimitPlan) -> Decision:
        known = self._live.get(request_id)
        if known is not None:
            return known.decision
        reply = await self._ask(request_id, plan) if self._joined else None
        if reply is None:
            return self._decide_apart(request_id, plan)
        return self._decided(request_id, plan, reply)

    async def settle(self, *request_ids: str, used_tokens: int | None) -> None:
        ending = {name: self._live.pop(name) for name in request_ids if name in self._live}
        if not ending:
            return
        for live in ending.values():
            self._running.remove_running(live.plan)
        used = -1 if used_tokens is None else used_tokens
        done = False
        try:
            if self._joined:
                ended = dict.fromkeys(ending, used)
                reply = await self._session.call("settle", Settle(self._session.caller(), ended), TIMEOUT_S)
                done = True
                for live in ending.values():
                    self._saw(live.plan, reply)
        except LinkDown as error:
            self._lose(str(error))
        finally:
            for request_id, live in ending.items():
                if self._share is not None:
                    self._share.settle(request_id, used_tokens)
                if not done and live.told:
                    self._ended[request_id] = used
                elif not done:
                    self._owed.add_debt(live.plan, used_tokens, live.at)

    # Decisions.

    async def _ask(self, request_id: str, plan: LimitPlan) -> Reply | None:
        """None where Redis is lost by this."""
        begin = time.perf_counter()
        caller = self._session.caller()
        asked = Reserve(caller, request_id, rates_of(plan), seats_of(plan), plan.held)
        self._asked.add(request_id)
        try:
            reply = await self._session.call("reserve", asked, TIMEOUT_S)
        except LinkDown as error:
            self._lose(str(error))
            return None
        except asyncio.CancelledError:
            self._ended[request_id] = -1
            raise
        finally:
            self._asked.discard(request_id)
        self._watch.redis_answered(time.perf_counter() - begin)
        return reply

    def _decided(self, request_id: str, plan: LimitPlan, reply: Reply) -> Decision:
        now = self._clock()
        refusals: list[LimitRefusal] = []
        for charge, spent_us, wait_us in zip(plan.rates, reply.spent, reply.waits, strict=True):
            self._seen[window_name(charge)] = Seen(charge.limit, now + spent_us / 1e6)
            if wait_us > 0:
                refusals.append(LimitRefusal(wait_us / 1e6, charge.refusal, charge.reached))
        self._sweep(now)
        states = (
            limit_window(charge.limit, min(spent_us / 1e6, PERIOD_S))
            for charge, spent_us in zip(plan.rates, reply.spent, strict=True)
        )
        again_s = max((refusal.wait_s for refusal in refusals), default=0.0)
        decision = Decision(tightest(plan, states), again_s)
        if reply.status == "refused":
            refusals += [
                LimitRefusal(PLACE_RETRY_S, place.refusal(what), place.reached(what))
                for place, over in zip(plan.places, reply.over, strict=True)
                for what in over
            ]
            raise limited(refusals, decision)
        self._hold(request_id, _Live(plan, decision, now, told=True))
        return decision

    def _decide_apart(self, request_id: str, plan: LimitPlan) -> Decision:
        try:
            if self._when_apart == "strict" and plan.is_limited:
                raise LimitsUnavailable(retry_after_s=UNDECIDED_RETRY_S)
            if self._share is None:
                parts = 1 if self._when_apart == "open" else self._session.replicas
                self._share = LocalShare(parts, self._seen, self._clock)
            decision = self._share.reserve(request_id, plan, self._running)
        except LimitsUnavailable:
            self._watch.decided_apart(passed=False)
            raise
        self._watch.decided_apart(passed=True)
        self._hold(request_id, _Live(plan, decision, self._clock(), told=False))
        return decision

    def _saw(self, plan: LimitPlan, reply: Reply) -> None:
        now = self._clock()
        for charge in plan.rates:
            name = window_name(charge)
            if name in reply.windows:
                self._seen[name] = Seen(charge.limit, now + reply.windows[name] / 1e6)

    def _see(self, name: str, limit: int, until: float, more: float = 0.0) -> None:
        """A window was spent at least `until` then, and `more` was charged: also what was spent apart counts when Redis
        goes again before it was asked for this window."""
        seen = self._seen.get(name)
        self._seen[name] = Seen(limit, (until if seen is None else max(until, seen.until)) + more)

    def _hold(self, request_id: str, live: _Live) -> None:
        self._live[request_id] = live
        self._running.add_running(live.plan)

    def _sweep(self, now: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._seen = {name: seen for name, seen in self._seen.items() if seen.until > now}

    # Being together and apart.

    def _lose(self, reason: str) -> None:
        if self._joined:
            self._joined = False
            self._lost_at = self._clock()
            self._lost.set()
            replicas = self._session.replicas
            log.error("limiter_redis_lost", reason=reason, replicas=replicas, decides=self._when_apart)
            self._watch.redis_up(False, replicas)

    def _back(self) -> None:
        self._joined = True
        self._lost.clear()
        self._share = None
        self._watch.redis_up(True, self._session.replicas)

    async def _keep(self) -> None:
        while True:
            if not self._joined:
                await self._rejoin()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._lost.wait()
            await self.beat()

    async def beat(self) -> None:
        """Say that this server lives, and hear how many do. Nothing else needs to call it; nothing is raised."""
        if not self._joined:
            return
        try:
            self._counted(await self._session.call("heartbeat", Beat(self._session.caller()), PATIENCE_S))
            if self._ended:
                ended = dict(self._ended)
                await self._session.call("settle", Settle(self._session.caller(), ended), PATIENCE_S)
                self._forget_ended(ended)
        except LinkDown as error:
            self._lose(str(error))

    async def _rejoin(self) -> None:
        begin = self._clock()
        tries = 0
        while True:
            await asyncio.sleep(RETRY_S[min(tries, len(RETRY_S) - 1)])
            tries += 1
            try:
                await self._link.connect()
                await self._join()
                # Decisions made here meanwhile are reported before any new request.
                self._back()
                log.info("limiter_redis_back", seconds=round(self._clock() - begin, 1), tries=tries)
                await self._join()
                return
            except LinkDown as error:
                self._lose(str(error))

    async def _join(self) -> None:
        """Reconcile: what runs here and Redis does not know is charged there, what Redis believes to run and does not
        is settled, and every window is at least as far spent as it was seen and has been spent since. Where Redis has
        lost its data, what only servers know that have not joined again is missing for as long (ADR 0019)."""
        session = self._session
        is_doubtful = session.is_doubtful
        began = self._clock()
        spending = await self._tell(began)
        session.number += 1  # of the next call
        ended = dict(self._ended)
        told = dict(self._live)
        now = self._clock()
        live = [
            Request(
                name,
                (now - one.at) * 1e6,
                one.told,
                rates_of(one.plan),
                seats_of(one.plan),
                one.plan.held,
            )
            for name, one in told.items()
        ]
        join = Join(
            session.caller(),
            born=session.born,
            is_doubtful=is_doubtful,
            ended=ended,
            live=live,
            asked=list(self._asked),
        )
        reply = await session.call("join", join, PATIENCE_S)
        self._telling = Owed()
        for debt in spending:
            spent_us = max(debt.seen + debt.sum * PERIOD_S * 1e6 / debt.limit, debt.floor)
            self._see(debt.name, debt.limit, began + spent_us / 1e6)
        for one in told.values():
            if not one.told:
                for charge in one.plan.rates:
                    self._see(window_name(charge), charge.limit, one.at, charge.seconds)
            one.told = True
        self._forget_ended(ended)
        session.born, session.is_doubtful = reply.born, False
        self._counted(reply)
        if reply.has_lost:
            log.error("limiter_redis_lost_data", told_windows=len(spending), told_requests=len(live))
            self._watch.redis_lost_data()

    async def _tell(self, now: float) -> list[Spending]:
        """The windows that were reported to Redis."""
        session = self._session
        if not self._telling:
            self._telling, self._owed = self._owed, Owed()
            self._batch += 1
        spending = list(self._telling.spending(self._seen, now, self._lost_at))
        for first in range(0, len(spending), MOST_TOLD):
            some = spending[first : first + MOST_TOLD]
            tell = Tell(session.caller(), session.born, session.is_doubtful, str(self._batch), some)
            await session.call("tell", tell, PATIENCE_S)
        return spending

    def _forget_ended(self, ended: dict[str, int]) -> None:
        for name in ended:
            self._ended.pop(name, None)

    def _counted(self, reply: Reply) -> None:
        # A Redis that has lost its data counts from one again; the next heartbeat hears how many have joined.
        self._session.replicas = (
            max(reply.replicas, self._session.replicas) if reply.has_lost else reply.replicas
        )
        self._watch.redis_up(self._joined, reply.replicas)
