"""The limits of all servers together, in one Redis; and what a server does while it is away.

A decision is one call of a Lua script (`redis_limiter.lua`), which sees every limit at one moment. It has 50 ms.
When an answer is late or bad, this server is *apart*: it decides by its own share of each limit (`redis_share`),
and looks for Redis in the background. That share begins when Redis, if it lives, has not heard of this server for a
second, and keeps just as much back from the others. When Redis is back, it is told what was spent meanwhile, and told
again what it may have lost; only then does it decide again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from loraplex.control.background import BackgroundTasks
from loraplex.control.errors import LimitsNotShared, LimitsUnavailable
from loraplex.control.limits.gcra import PERIOD_S
from loraplex.control.limits.in_process import Refusal, Running, limit_window, limited
from loraplex.control.limits.limiter import PLACE_RETRY_S
from loraplex.control.limits.plan import LimitPlan, What
from loraplex.control.limits.redis_link import LinkDown, RedisLink
from loraplex.control.limits.redis_messages import (
    Beat,
    Join,
    Leave,
    Reply,
    Report,
    Request,
    Reserve,
    Settle,
    rates_of,
    seats_of,
    window_name,
)
from loraplex.control.limits.redis_share import LocalShare, Owed, Part, Seen
from loraplex.control.types import Decision, LimitWindow

TIMEOUT_S = 0.05
"""For what a request waits for."""
PATIENCE_S = 0.5
"""For what is done in the background."""
HEARTBEAT_S = 0.25
"""Shorter than SILENCE_S, so that one that is a little late costs nothing. A replica that Redis has not heard of for
15 s (LEASE in the script) has given back what it held."""
SILENCE_S = 1.0
"""As in the script: then Redis begins to keep back what this server may spend by itself."""
DRIFT_S = 0.1
"""So much later this server begins, as no two clocks run alike."""
RETRY_S = (0.0, 0.02, 0.05, 0.1)
"""Pauses before Redis is looked for again; the last one for ever."""
MOST_REPORTED = 500
"""Windows that one call tells of: it may not stand in the way of others for long."""
SWEEP_EVERY = 4096
log = structlog.get_logger("loraplex")


class LimiterWatch(Protocol):
    """What is measured."""

    def redis_answered(self, seconds: float) -> None:
        """A decision came from Redis."""

    def decided_apart(self, passed: bool) -> None:
        """A decision was made without it."""

    def redis_up(self, up: bool, replicas: int) -> None:
        """Decisions come from Redis, or not; `replicas` that live, as last heard."""

    def redis_lost_data(self) -> None:
        """It came back without what this server had told it."""


@dataclass(slots=True)
class _Live:
    """A reservation that has not ended. `at_us` on Redis' clock. `told`: Redis knows of it."""

    plan: LimitPlan
    decision: Decision
    at_us: float
    told: bool


class RedisLimiter:
    """See `Limiter`. `start` before the first decision. `clock` is monotonic seconds.

    `reserve` also raises LimitsUnavailable. `settle` raises nothing: what Redis could not be told now it is told later.
    """

    name = "redis"

    def __init__(
        self,
        link: RedisLink,
        watch: LimiterWatch,
        *,
        clock: Callable[[], float] = time.monotonic,
        background: BackgroundTasks | None = None,
    ) -> None:
        self._link = link
        self._watch = watch
        self._clock = clock
        self._background = background or BackgroundTasks()
        self._replica = uuid.uuid4().hex
        self._number = 0
        self._born = ""
        self._has_been_joined = False
        self._offset_us = 0.0
        self._part = Part(1, 0)
        self._joined = False
        self._lost = asyncio.Event()
        self._found = asyncio.Event()
        self._lost_us = 0.0
        # When that was sent by which Redis may last have heard of this server.
        self._heard = clock()
        self._share: LocalShare | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._live: dict[str, _Live] = {}
        self._running = Running()
        self._seen: dict[str, Seen] = {}
        self._owed = Owed()
        self._batch = 0  # of what is owed, as Redis may have been told of it
        self._ended: dict[str, int] = {}
        self._decisions = 0

    async def start(self) -> None:
        """What was never seen cannot be shared: raises LimitsNotShared where Redis cannot be used."""
        try:
            await self._link.connect()
            is_ready = await self._join(apart=False)
        except LinkDown as error:
            raise LimitsNotShared(f"the Redis of the limits cannot be used: {error}.") from error
        if is_ready:
            self._back()
        else:
            self._lost_us = self._now_us()
        self._keeper = self._background.start("limiter-redis", self._keep)

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._joined:
            with contextlib.suppress(LinkDown):
                await self._call("leave", Leave(self._replica, str(self._number)), PATIENCE_S)
        await self._link.close()

    async def reserve(self, request_id: str, plan: LimitPlan) -> Decision:
        known = self._live.get(request_id)
        if known is not None:
            return known.decision
        end = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            reply = await self._ask(request_id, plan) if self._joined else None
            if reply is not None:
                return self._decided(request_id, plan, reply)
            try:
                return self._decide_apart(request_id, plan)
            except LimitsUnavailable:
                if await self._is_back_by(end):
                    continue
                self._watch.decided_apart(passed=False)
                raise

    async def settle(self, *request_ids: str, used_tokens: int | None) -> None:
        ending = {name: self._live.pop(name) for name in request_ids if name in self._live}
        if not ending:
            return
        for live in ending.values():
            self._running.remove(live.plan)
        used = -1 if used_tokens is None else used_tokens
        done = False
        try:
            if self._joined:
                ended = dict.fromkeys(ending, used)
                reply = await self._call("settle", self._settling(ended), TIMEOUT_S)
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
                    self._owed.add(live.plan, used_tokens, live.at_us)

    # Decisions.

    async def _ask(self, request_id: str, plan: LimitPlan) -> Reply | None:
        """None where Redis is lost by this."""
        begin = time.perf_counter()
        asked = Reserve(
            self._replica, str(self._number), request_id, rates_of(plan), seats_of(plan), plan.sequences
        )
        try:
            reply = await self._call("reserve", asked, TIMEOUT_S)
        except LinkDown as error:
            self._lose(str(error))
            return None
        except asyncio.CancelledError:
            self._ended[request_id] = -1
            raise
        self._watch.redis_answered(time.perf_counter() - begin)
        return reply

    def _decided(self, request_id: str, plan: LimitPlan, reply: Reply) -> Decision:
        tightest: dict[What, LimitWindow] = {}
        refusals: list[Refusal] = []
        for charge, spent_us, wait_us in zip(plan.rates, reply.spent, reply.waits, strict=True):
            self._seen[window_name(charge)] = Seen(charge.limit, reply.now + spent_us)
            state = limit_window(charge.limit, min(spent_us / 1e6, PERIOD_S))
            if charge.what not in tightest or state.remaining < tightest[charge.what].remaining:
                tightest[charge.what] = state
            if wait_us > 0:
                refusals.append(Refusal(wait_us / 1e6, charge.refusal, charge.owner))
        self._sweep(reply.now)
        again_s = max((refusal.wait_s for refusal in refusals), default=0.0)
        decision = Decision(tightest.get("requests"), tightest.get("tokens"), again_s)
        if reply.status == "refused":
            for place, full, crowded in zip(plan.places, reply.full, reply.crowded, strict=True):
                if full:
                    refusals.append(Refusal(PLACE_RETRY_S, place.refusal, place.owner))
                if crowded:
                    refusals.append(Refusal(PLACE_RETRY_S, place.sequences_refusal, place.owner))
            raise limited(refusals, decision)
        self._hold(request_id, _Live(plan, decision, reply.now, told=True))
        return decision

    def _decide_apart(self, request_id: str, plan: LimitPlan) -> Decision:
        decision = self._own_share().reserve(request_id, plan, self._running)
        self._watch.decided_apart(passed=True)
        self._hold(request_id, _Live(plan, decision, self._now_us(), told=False))
        return decision

    def _own_share(self) -> LocalShare:
        if self._share is None:
            self._share = LocalShare(self._part, self._heard + SILENCE_S + DRIFT_S, self._clock)
        return self._share

    async def _is_back_by(self, end: float) -> bool:
        """Most times Redis was only late. Once the share has begun, nobody waits for it."""
        left = end - asyncio.get_running_loop().time()
        if left <= 0 or self._own_share().has_begun:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._found.wait()
        return self._joined

    def _saw(self, plan: LimitPlan, reply: Reply) -> None:
        for charge in plan.rates:
            name = window_name(charge)
            self._seen[name] = Seen(charge.limit, reply.now + reply.windows.get(name, 0.0))

    def _see(self, name: str, limit: int, until: float, more: float = 0.0) -> None:
        """A window was spent at least `until` then, and `more` was charged: also what was spent apart counts when Redis
        goes again before it was asked for this window."""
        seen = self._seen.get(name)
        self._seen[name] = Seen(limit, (until if seen is None else max(until, seen.until)) + more)

    def _hold(self, request_id: str, live: _Live) -> None:
        self._live[request_id] = live
        self._running.add(live.plan)

    def _sweep(self, now_us: float) -> None:
        self._decisions += 1
        if self._decisions % SWEEP_EVERY == 0:
            self._seen = {name: seen for name, seen in self._seen.items() if seen.until > now_us}

    # Being together and apart.

    def _lose(self, reason: str) -> None:
        if self._joined:
            self._joined = False
            self._lost_us = self._now_us()
            self._lost.set()
            self._found.clear()
            log.error("limiter_redis_lost", reason=reason, replicas=self._part.replicas)
            self._watch.redis_up(False, self._part.replicas)

    def _back(self) -> None:
        self._joined = self._has_been_joined = True
        self._lost.clear()
        self._found.set()
        self._share = None
        self._watch.redis_up(True, self._part.replicas)

    async def _keep(self) -> None:
        while True:
            if not self._joined:
                await self._rejoin()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._lost.wait()
            await self.beat()

    async def beat(self) -> None:
        """Say that this server lives, and hear how many do. Nothing else needs to call it; nothing is raised. While it
        is apart it says nothing, and Redis keeps its share back."""
        if not self._joined:
            return
        try:
            self._heard = self._clock()
            beat = Beat(self._replica, str(self._number), self._heard_us(), self._part.replicas)
            self._counted(await self._call("heartbeat", beat, PATIENCE_S))
            if self._ended:
                ended = dict(self._ended)
                await self._call("settle", self._settling(ended), PATIENCE_S)
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
                if not await self._join(apart=True):
                    continue  # others are not back yet
                # What was decided here meanwhile is told before any request that comes now.
                self._back()
                log.info("limiter_redis_back", seconds=round(self._clock() - begin, 1), tries=tries)
                if await self._join(apart=False):
                    return
                self._lose("Redis has lost its data again")
            except LinkDown as error:
                self._lose(str(error))

    async def _join(self, *, apart: bool) -> bool:
        """Reconcile: what runs here and Redis does not know is charged there, what Redis believes to run and does not
        is settled, and every window is at least as far spent as it was seen and has been spent since. `apart`: this
        server decides by itself until it hears the answer. False: Redis lost its data or was away for long, and other
        servers have yet to tell what they know."""
        self._number += 1
        number = str(self._number)
        owed, self._owed = self._owed, Owed()
        ended = dict(self._ended)
        told = dict(self._live)
        spending = owed.spending(self._seen, self._now_us(), self._lost_us)
        live = [
            Request(name, one.at_us, one.told, rates_of(one.plan), seats_of(one.plan), one.plan.sequences)
            for name, one in told.items()
        ]
        if not apart:
            self._heard = self._clock()
        join = Join(
            replica=self._replica,
            number=number,
            batch=str(self._batch),
            heard=self._heard_us() if self._born else -1.0,
            replicas=self._part.replicas if self._born else 0,
            born=self._born,
            rates=spending[:MOST_REPORTED],
            ended=ended,
            live=live,
            knows=self._has_been_joined,
            is_whole=len(spending) <= MOST_REPORTED,
        )
        try:
            reply = await self._call("join", join, PATIENCE_S)
            is_ready = reply.ready
            for first in range(MOST_REPORTED, len(spending), MOST_REPORTED):
                some = spending[first : first + MOST_REPORTED]
                is_last = first + MOST_REPORTED >= len(spending)
                report = Report(self._replica, number, join.batch, some, reply.has_lost, join.knows, is_last)
                is_ready = (await self._call("report", report, PATIENCE_S)).ready
        except BaseException:
            # It may have been done all the same: then Redis charges what has come to it since.
            owed.merge(self._owed)
            self._owed = owed
            raise
        for debt in spending:
            self._see(
                debt.name, debt.limit, max(debt.seen + debt.sum * PERIOD_S * 1e6 / debt.limit, debt.floor)
            )
        for one in told.values():
            if not one.told:
                for charge in one.plan.rates:
                    self._see(window_name(charge), charge.limit, one.at_us, charge.seconds * 1e6)
            one.told = True
        self._forget_ended(ended)
        self._batch += 1
        if not self._born:
            self._heard = self._clock()  # at its first joining Redis takes the time itself
        self._born = reply.born
        self._counted(reply)
        if reply.has_lost:
            log.error("limiter_redis_lost_data", told_windows=len(spending), told_requests=len(live))
            self._watch.redis_lost_data()
        return is_ready

    def _forget_ended(self, ended: dict[str, int]) -> None:
        for name in ended:
            self._ended.pop(name, None)

    def _counted(self, reply: Reply) -> None:
        self._part = Part(reply.replicas, reply.rank)
        self._watch.redis_up(self._joined, reply.replicas)

    # Calls.

    async def _call(self, operation: str, given: msgspec.Struct, timeout_s: float) -> Reply:
        """Raises LinkDown, too, where Redis does not know this server any more."""
        raw = await self._link.call(operation, msgspec.msgpack.encode(given), timeout_s)
        reply = msgspec.msgpack.decode(raw, type=Reply)
        self._offset_us = reply.now - self._clock() * 1e6
        if reply.status == "unknown":
            raise LinkDown("Redis has forgotten this server")
        return reply

    def _now_us(self) -> float:
        """Redis' clock, as far as it is known here."""
        return self._clock() * 1e6 + self._offset_us

    def _heard_us(self) -> float:
        return self._heard * 1e6 + self._offset_us

    def _settling(self, ended: dict[str, int]) -> Settle:
        return Settle(self._replica, str(self._number), ended)
