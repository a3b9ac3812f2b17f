"""Redis slow, hung, killed and without memory, again and again, under requests that never stop."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

import pytest

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import TAG, RedisLink, redis_script
from loraplex.control.types import NO_LIMITS
from support.limit_watch import Watch
from support.limiters import tenant, whole_plan
from support.redis_server import RedisServer, redis_server

CLIENTS = 30
PROMISED_S = 0.06
NO_HANG_S = 1.0


@dataclass
class Drill:
    """What requests met. `together` and `apart`: seconds that reserving and settling took, by what was the case."""

    redis: RedisServer
    rng: random.Random
    limiters: list[RedisLimiter]
    faulty: bool = False
    ended: bool = False
    refused: int = 0
    unavailable: int = 0
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    async def client(self, number: int) -> None:
        """Request after request, of one of five tenants, on one of the servers."""
        rng = random.Random(number)
        turn = 0
        while not self.ended:
            turn += 1
            who = tenant(
                f"t{number % 5}", tokens_per_minute=60_000, requests_per_minute=3000, max_concurrency=6
            )
            asked = rng.randint(1, 100)
            plan = whole_plan(who, NO_LIMITS, prompt_tokens=1, asked_tokens=asked, default_tokens=1, n=1)
            limiter, name = rng.choice(self.limiters), f"c{number}-{turn}"
            try:
                await self.timed(limiter.reserve(name, plan))
            except RateLimited:
                self.refused += 1
            except LimitsUnavailable:
                self.unavailable += 1
            else:
                await asyncio.sleep(rng.random() * 0.05)
                await self.timed(limiter.settle(name, used_tokens=rng.choice([None, 1, asked])))
            await asyncio.sleep(rng.random() * 0.05)

    async def timed(self, call: object) -> None:
        begin, faulty = time.perf_counter(), self.faulty
        try:
            await call  # type: ignore[misc]
        finally:
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

    def percentile(self, faulty: bool, part: float) -> float:
        ordered = sorted(self.seconds[faulty])
        return ordered[int(part * (len(ordered) - 1))]


async def run_drill(faults: int, seed: int) -> Drill:
    redis = redis_server()
    redis.client.flushall()
    watches = [Watch(), Watch()]
    limiters = [RedisLimiter(RedisLink(redis.url, redis_script()), watch) for watch in watches]
    drill = Drill(redis, random.Random(seed), limiters)
    try:
        for limiter in limiters:
            await limiter.start()
        clients = [asyncio.create_task(drill.client(number)) for number in range(CLIENTS)]
        for _ in range(faults):
            await asyncio.sleep(drill.rng.uniform(0.1, 0.3))
            await drill.fault()
        await asyncio.sleep(0.3)
        drill.ended = True
        async with asyncio.timeout(10):
            await asyncio.gather(*clients)
            while not all(watch.up for watch in watches):
                await asyncio.sleep(0.01)
        for limiter in limiters:
            await limiter.beat()
        assert redis.client.keys(f"{TAG}:busy:*") == []
        assert redis.client.keys(f"{TAG}:live:*") == []
    finally:
        redis.revive()
        for limiter in limiters:
            await limiter.close()
    for faulty, when in ((True, f"in {faults} faults"), (False, "between")):
        p99, longest = (drill.percentile(faulty, part) * 1000 for part in (0.99, 1))
        print(f"\n{when}: {len(drill.seconds[faulty])} calls, p99 {p99:.1f} ms, longest {longest:.1f} ms")
    print(f"{drill.refused} refused, {drill.unavailable} unavailable")
    return drill


@pytest.mark.slow
async def test_requests_go_on_through_faults() -> None:
    drill = await run_drill(faults=6, seed=1)
    assert drill.percentile(True, 1) < NO_HANG_S


@pytest.mark.soak
async def test_requests_go_on_through_faults_at_length() -> None:
    """On a machine that has nothing else to do, as times are promised."""
    drill = await run_drill(faults=150, seed=2)
    assert drill.percentile(True, 0.99) <= PROMISED_S
    assert drill.percentile(True, 1) < NO_HANG_S
