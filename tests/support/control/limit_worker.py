"""One of several server processes on one Redis.

    python -m support.control.limit_worker URL NAME ROUNDS WHEN_APART [LATE]

Prints "ready", waits for a line, then has 50 requests under way at a time, ROUNDS times over. With LATE all answers of
Redis come too late in the middle third of the rounds; what it was asked for is done all the same. At the end prints
JSON: how many decisions were not made in Redis, how many of them passed, and each request that passed as [before,
after, ended, reserved, used, sequences]: the times just before and after its reservation and before it was settled, its
tokens, and its sequences.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import cast

from loraplex.control.errors import LimitsUnavailable, RateLimited
from loraplex.control.limits.limiter import WhenApart
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.types import Limits, Principal
from support.control.limit_watch import PatientLink, Watch, patient_script
from support.control.limiters import whole_plan

AT_A_TIME = 50
ROUND_S = 0.05
"""At least; or all of them would be refused in a moment."""
SERVER = Limits(tokens_per_minute=30_000)
TENANT = Limits(requests_per_minute=150, tokens_per_minute=12_000, max_concurrency=40, max_sequences=75)


async def work(url: str, name: str, rounds: int, when_apart: WhenApart, late: bool) -> None:
    watch = Watch()
    link = PatientLink(url, patient_script())
    limiter = RedisLimiter(link, watch, when_apart=when_apart)
    await limiter.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    passed: list[tuple[float, float, float, int, int, int]] = []
    rng = random.Random(name)
    who = Principal("acme", name, frozenset(), tenant_limits=TENANT)

    async def request(request_id: str, prompt: int, answer: int, n: int, used: int, seconds: float) -> None:
        plan = whole_plan(
            who,
            SERVER,
            prompt_tokens=prompt,
            asked_tokens=answer,
            default_tokens=1,
            n=n,
        )
        before = time.time()
        try:
            await limiter.reserve(request_id, plan)
        except (RateLimited, LimitsUnavailable):
            return
        after = time.time()
        await asyncio.sleep(seconds)
        passed.append((before, after, time.time(), plan.tokens, used, n))
        await limiter.settle(request_id, used_tokens=used)

    for turn in range(rounds):
        link.reach = "late" if late and rounds // 3 <= turn < 2 * rounds // 3 else "answers"
        requests = []
        for number in range(AT_A_TIME):
            n = rng.randint(1, 3)
            prompt, answer = rng.randint(1, 100), rng.randint(1, 200) // n
            used = rng.randint(prompt, prompt + n * answer)
            requests.append(request(f"{name}-{turn}-{number}", prompt, answer, n, used, rng.random() / 10))
        await asyncio.gather(asyncio.sleep(ROUND_S), *requests)
    async with asyncio.timeout(60):  # one that is apart could not tell what has ended
        while not watch.up:
            await asyncio.sleep(0.005)
    await limiter.close()
    print(json.dumps({"apart": len(watch.apart), "passed_apart": sum(watch.apart), "passed": passed}))


if __name__ == "__main__":
    url, name, rounds, when_apart, *options = sys.argv[1:]
    asyncio.run(work(url, name, int(rounds), cast(WhenApart, when_apart), late="LATE" in options))
