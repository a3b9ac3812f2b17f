"""Redis slow, hung, killed and without memory, again and again, under requests that never stop: how many of those
that the limits allow are served, and how long they wait."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.limiter import Limiter, WhenApart
from loraplex.control.limits.plan import LimitPlan
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import TAG, redis_script
from loraplex.control.types import NO_LIMITS, Decision
from support.control.limit_watch import PatientLink, Watch
from support.control.limiters import tenant, whole_plan
from support.servers.redis_server import RedisServer, redis_server
from support.waiting import LoopTime

CLIENTS = 30
PROMISED_S = 0.06
NO_HANG_S = 1.0
SERVED = 0.99
"""Of the requests that the limits allow, while Redis is faulty."""
LIMITS = {"tokens_per_minute": 60_000, "requests_per_minute": 3000, "max_concurrency": 12}
"""A server's share of the places holds all clients of a tenant: they do not divide evenly among the servers."""
SMALL = {"requests_per_minute": 60, "max_concurrency": 12}
"""One tenant of five asks for more than it may."""


@dataclass
class Drill:
    """What requests met, by whether Redis was faulty then: `seconds` that reserving and settling took; and for each
    tenant how many requests one process' limiter lets pass of the same ones (`allowed`), and how many `passed`.
    `longest_s` of all, without what this process was held up."""

    redis: RedisServer
    rng: random.Random
    limiters: Sequence[Limiter]
    faulty: bool = False
    ended: bool = False
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    now: LoopTime = field(default_factory=LoopTime)
    longest_s: float = 0.0
    allowed: Counter[tuple[bool, int]] = field(default_factory=Counter)
    passed: Counter[tuple[bool, int]] = field(default_factory=Counter)
    oracle: Limiter = field(default_factory=InProcessLimiter)

    async def client(self, number: int) -> None:
        """Request after request, of one of five tenants, on one of the servers."""
        rng = random.Random(number)
        turn = 0
        while not self.ended:
            turn += 1
            who = tenant(f"t{number % 5}", **(LIMITS if number % 5 else SMALL))
            asked = rng.randint(1, 100)
            plan = whole_plan(who, NO_LIMITS, prompt_tokens=1, asked_tokens=asked, default_tokens=1, n=1)
            limiter, name = rng.choice(self.limiters), f"c{number}-{turn}"
            faulty, used = self.faulty, rng.choice([None, 1, asked])
            with contextlib.suppress(RateLimited):
                await self.oracle.reserve(name, plan)
                self.allowed[faulty, number % 5] += 1
            try:
                await self.timed(limiter.reserve(name, plan))
            except (RateLimited, LimitsUnavailable):
                pass
            else:
                self.passed[faulty, number % 5] += 1
                await asyncio.sleep(rng.random() * 0.05)
                await self.timed(limiter.settle(name, used_tokens=used))
            await self.oracle.settle(name, used_tokens=used)
            await asyncio.sleep(rng.random() * 0.05)

    async def timed(self, call: object) -> None:
        begin, faulty = time.perf_counter(), self.faulty
        began = self.now.seconds
        try:
            await call  # type: ignore[misc]
        finally:
            self.longest_s = max(self.longest_s, self.now.seconds - began)
            self.seconds[faulty].append(time.perf_counter() - begin)

    async def fault(self) -> None:
        kind = self.rng.choice(["slow", "hung", "killed", "full"])
        self.faulty = True
        if kind == "slow":
            for _ in range(10):
                self.redis.hang()
                await asyncio.sleep(self.rng.uniform(0.01, 0.045))
                self.redis.go_on()
                await asyncio.sleep(0.01)
        elif kind == "hung":
            self.redis.hang()
            await asyncio.sleep(self.rng.uniform(0.2, 1.0))
            self.redis.go_on()
        elif kind == "killed":
            self.redis.kill()
            await asyncio.sleep(self.rng.uniform(0.0, 0.5))
            await asyncio.to_thread(self.redis.start)
        else:
            await asyncio.to_thread(self.redis.fill_memory)
            await asyncio.sleep(self.rng.uniform(0.2, 0.5))
            await asyncio.to_thread(self.redis.free_memory)
        self.faulty = False

    def check(self) -> None:
        """What is promised of any machine. A limiter that refuses is quick, and serves nobody."""
        assert self.longest_s < NO_HANG_S
        served, allowed = self.served(True)
        assert served >= SERVED * allowed > 0

    def served(self, faulty: bool) -> tuple[int, int]:
        """Requests that were served of those that the limits allow, and these."""
        allowed = {of: count for of, count in self.allowed.items() if of[0] == faulty}
        return sum(min(count, self.passed[of]) for of, count in allowed.items()), sum(allowed.values())

    def percentile(self, faulty: bool, part: float) -> float:
        ordered = sorted(self.seconds[faulty])
        return ordered[int(part * (len(ordered) - 1))]


async def run_drill(
    faults: int,
    seed: int,
    *,
    when_apart: WhenApart = "share",
    plant: Callable[[Limiter], Limiter] | None = None,
) -> Drill:
    """`plant`: puts a limiter that is wrong around each one."""
    redis = redis_server()
    redis.client.flushall()
    watches = [Watch(), Watch()]
    links = [PatientLink(redis.url, redis_script()) for _ in watches]
    limiters = [
        RedisLimiter(link, watch, when_apart=when_apart) for link, watch in zip(links, watches, strict=True)
    ]
    drill = Drill(redis, random.Random(seed), [plant(one) for one in limiters] if plant else limiters)
    try:
        for limiter, link in zip(limiters, links, strict=True):
            await limiter.start()
            link.patience_s = 0.0
        async with drill.now.running():
            clients = [asyncio.create_task(drill.client(number)) for number in range(CLIENTS)]
            for _ in range(faults):
                await asyncio.sleep(drill.rng.uniform(0.1, 0.3))
                await drill.fault()
            await asyncio.sleep(0.3)
            drill.ended = True
            async with asyncio.timeout(60):
                await asyncio.gather(*clients)
        async with asyncio.timeout(60):
            # What ended while Redis was late is told with a heartbeat.
            while not all(watch.up for watch in watches) or redis.client.keys(f"{TAG}:busy:*"):
                await asyncio.sleep(0.01)
        assert redis.client.keys(f"{TAG}:live:*") == []
    finally:
        redis.revive()
        for limiter in limiters:
            await limiter.close()
    for faulty, when in ((True, f"in {faults} faults"), (False, "between")):
        p99, longest = (drill.percentile(faulty, part) * 1000 for part in (0.99, 1))
        served, allowed = drill.served(faulty)
        print(
            f"\n{when}: {len(drill.seconds[faulty])} calls, p99 {p99:.1f} ms, longest {longest:.1f} ms; "
            f"{served} of {allowed} requests served that the limits allow ({served / max(1, allowed):.1%})"
        )
    few = (
        [drill.passed[faulty, 0] for faulty in (True, False)],
        [drill.allowed[True, 0], drill.allowed[False, 0]],
    )
    print(f"of the tenant that asks for too much {few[0]} passed, and {few[1]} are allowed")
    return drill


@pytest.mark.slow
async def test_requests_go_on_through_faults() -> None:
    (await run_drill(faults=6, seed=1)).check()


class RefusesAll(InProcessLimiter):
    """Planted: nobody waits for it, and nothing is left behind."""

    def __init__(self, _: Limiter) -> None:
        super().__init__()

    async def reserve(self, request_id: str, plan: LimitPlan) -> Decision:
        raise LimitsUnavailable(retry_after_s=1.0)


@pytest.mark.slow
async def test_a_limiter_that_refuses_everything_fails() -> None:
    drill = await run_drill(faults=2, seed=1, plant=RefusesAll)
    with pytest.raises(AssertionError):
        drill.check()
    assert drill.percentile(True, 0.99) <= PROMISED_S, "it is quick"


@pytest.mark.slow
async def test_a_limiter_that_decides_nothing_without_redis_fails() -> None:
    drill = await run_drill(faults=4, seed=1, when_apart="strict")
    with pytest.raises(AssertionError):
        drill.check()


@pytest.mark.soak
async def test_requests_go_on_through_faults_at_length() -> None:
    """On a machine that has nothing else to do, as times are promised."""
    drill = await run_drill(faults=150, seed=2)
    drill.check()
    assert drill.percentile(True, 0.99) <= PROMISED_S
