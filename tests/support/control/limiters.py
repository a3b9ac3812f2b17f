"""Limiters for the conformance suite, each with its clock: one moved by hand, or the real one."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.limiter import Limiter, WhenApart
from loraplex.control.limits.plan import LimitPlan, plan_admission, plan_request
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import TAG, redis_script
from loraplex.control.types import NO_LIMITS, Decision, Limits, Principal
from support.control.limit_watch import PatientLink, Watch
from support.control.plane import FakeClock, caller
from support.servers.redis_server import RedisServer, redis_server

CLOCK_KEY = f"{TAG}:clock-of-tests"
START_US = 1.8e15
"""As large as real times are."""


class LimiterKit:
    """One limiter as tests use it: calls are plain functions, `advance` lets its time pass.

    `tolerance_s`: how far its times may be off, for limiters on a real clock. A test process has one event loop a kit,
    so that connections stay with it.
    """

    def __init__(self, limiter: Limiter, advance: Callable[[float], None], tolerance_s: float = 1e-6) -> None:
        self.limiter = limiter
        self.advance = advance
        self.tolerance_s = tolerance_s
        self._ids = (f"r{number}" for number in itertools.count())
        self._runner = asyncio.Runner()

    def reserve(
        self,
        principal: Principal,
        prompt: int = 1,
        asked: int | None = 1,
        n: int = 1,
        *,
        server: Limits = NO_LIMITS,
        request_id: str | None = None,
    ) -> Held:
        plan = whole_plan(
            principal, server, prompt_tokens=prompt, asked_tokens=asked, default_tokens=256, n=n
        )
        name = request_id or next(self._ids)
        return Held(name, plan, self.run(self.limiter.reserve(name, plan)))

    def settle(self, held: Held, used: int | None) -> None:
        self.run(self.limiter.settle(held.request_id, used_tokens=used))

    def refused(self, principal: Principal, **asked: Any) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            self.reserve(principal, **asked)
        return caught.value

    def about(self, seconds: float) -> Any:
        """For a comparison with a time that was told."""
        return pytest.approx(seconds, abs=2 * self.tolerance_s)

    def run(self, call: Any) -> Any:
        return self._runner.run(call)

    def close(self) -> None:
        self.run(self.limiter.close())
        self._runner.close()


class Held:
    """A reservation with what it took."""

    def __init__(self, request_id: str, plan: LimitPlan, decision: Decision) -> None:
        self.request_id = request_id
        self.plan = plan
        self.decision = decision

    @property
    def tokens_left(self) -> int:
        return self.decision.windows["tokens"].remaining

    @property
    def requests_left(self) -> int:
        return self.decision.windows["requests"].remaining


def whole_plan(principal: Principal, server: Limits, **asked: Any) -> LimitPlan:
    """What a request is charged in all, as one plan."""
    plan = plan_request(principal, server, **asked)
    return replace(plan, rates=(*plan_admission(principal, server).rates, *plan.rates))


def request_plan(who: Principal, tokens: int = 1, server: Limits = NO_LIMITS) -> LimitPlan:
    """A request of one prompt token and an answer; `tokens` in all."""
    return whole_plan(who, server, prompt_tokens=1, asked_tokens=tokens - 1, default_tokens=1, n=1)


async def passing_requests(
    limiter: RedisLimiter, who: Principal, most: int, name: str, tokens: int = 1
) -> list[str]:
    """Those of `most` requests that pass."""
    passed = []
    for number in range(most):
        try:
            await limiter.reserve(f"{name}{number}", request_plan(who, tokens))
        except (RateLimited, LimitsUnavailable):
            continue
        passed.append(f"{name}{number}")
    return passed


def in_process_kit() -> LimiterKit:
    clock = FakeClock()
    return LimiterKit(InProcessLimiter(clock=clock), clock.advance)


def tenant(name: str = "acme", **limits: int) -> Principal:
    """A caller whose tenant has these limits, and whose key has none."""
    return caller(name, tenant_limits=Limits(**limits))


def redis_kit() -> LimiterKit:
    """On a real Redis whose script takes the time from a key, which `advance` moves with the limiter's own clock."""
    server = redis_server()
    server.client.flushall()
    clock = FakeClock()
    limiter = RedisLimiter(PatientLink(server.url, with_clock_of_tests(redis_script())), Watch(), clock=clock)

    def advance(seconds: float) -> None:
        clock.advance(seconds)
        server.client.set(CLOCK_KEY, repr(START_US + clock.seconds * 1e6))

    advance(0.0)
    kit = LimiterKit(limiter, advance)
    kit.run(limiter.start())
    return kit


def with_clock_of_tests(script: str) -> str:
    """The same script, which reads the time where it would have asked Redis for it. Its windows outlast the time that
    tests take: they expire by Redis' own clock, which goes on while a busy machine does not."""
    for old, new in (
        (
            "local clock = redis.call('TIME')\nlocal now = clock[1] * 1e6 + clock[2]\n",
            f"local now = tonumber(redis.call('GET', '{CLOCK_KEY}') or error('no time'))\n",
        ),
        ("spent(window) / window.limit + SLACK) / 1000)", "spent(window) / window.limit + 600e6) / 1000)"),
    ):
        assert old in script
        script = script.replace(old, new)
    return script


class SharedLimits:
    """Several servers' limiters on one Redis, in one event loop and on one clock that is moved by hand. Fresh each
    time; an async context manager. `skew_s`: by which Redis' clock was set forward. `port`: of a way to Redis that is
    not the direct one."""

    def __init__(self, redis: RedisServer | None = None, *, port: int | None = None) -> None:
        self.redis = redis or redis_server()
        self.port = port
        self.skew_s = 0.0
        self.clock = FakeClock()
        self.limiters: list[RedisLimiter] = []
        self.watches: list[Watch] = []
        self.links: list[PatientLink] = []

    async def __aenter__(self) -> SharedLimits:
        self.redis.client.flushall()
        self.advance(0.0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.redis.revive()
        for limiter in self.limiters:
            await limiter.close()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.tell_time()

    def tell_time(self) -> None:
        """Again, to a Redis that lost it."""
        self.redis.client.set(CLOCK_KEY, repr(START_US + (self.clock.seconds + self.skew_s) * 1e6))

    async def servers(
        self, number: int, *, port: int | None = None, when_apart: WhenApart = "share"
    ) -> list[RedisLimiter]:
        """New ones, which have heard of each other. `port`: of a way to Redis that is not the direct one."""
        script = with_clock_of_tests(redis_script())
        url = f"redis://127.0.0.1:{port or self.port or self.redis.port}"
        for _ in range(number):
            self.watches.append(Watch())
            self.links.append(PatientLink(url, script))
            limiter = RedisLimiter(self.links[-1], self.watches[-1], when_apart=when_apart, clock=self.clock)
            self.limiters.append(limiter)
            await limiter.start()
        for limiter in self.limiters:
            await limiter.beat()
        return self.limiters[-number:]

    def hang(self) -> None:
        """Redis hangs, and servers wait no longer than they do."""
        self.lose_patience()
        self.redis.hang()

    def lose_patience(self) -> None:
        for link in self.links:
            link.patience_s = 0.0

    def go_on(self) -> None:
        """Redis answers again, and its clock has gone on meanwhile."""
        self.redis.go_on()
        self.tell_time()
        for link in self.links:
            link.patience_s = PatientLink.patience_s

    async def pass_time(self, seconds: float) -> None:
        """In which servers let hear of themselves."""
        for _ in range(math.ceil(seconds)):
            self.advance(seconds / math.ceil(seconds))
            for limiter in self.limiters:
                await limiter.beat()

    async def noticed(self) -> None:
        """Until every server knows that Redis does not answer."""
        plan = whole_plan(tenant("any"), NO_LIMITS, prompt_tokens=1, asked_tokens=1, default_tokens=1, n=1)
        for number, limiter in enumerate(self.limiters):
            await limiter.reserve(f"notices-{number}", plan)
            await limiter.settle(f"notices-{number}", used_tokens=1)
        assert not any(watch.up for watch in self.watches)

    async def hang_for(self, seconds: float) -> None:
        """Redis hangs, and for so long."""
        self.hang()
        await self.noticed()
        self.clock.advance(seconds)

    async def together(self) -> None:
        """Until every server decides in Redis again."""
        async with asyncio.timeout(60):
            while not all(watch.up for watch in self.watches):
                await asyncio.sleep(0.005)
        for limiter in self.limiters:
            await limiter.beat()  # after all that it told when it came back

    def running(self) -> int:
        """Requests that Redis believes to run."""
        return int(self.redis.client.get(f"{TAG}:busy:server:") or 0)

    def joined(self) -> dict[str, str]:
        """The number of its joining, for each server."""
        state = self.redis.client.hgetall(f"{TAG}:state")
        return {
            name.decode(): value.decode()
            for name, value in state.items()
            if name not in (b"born", b"decisions")
        }
