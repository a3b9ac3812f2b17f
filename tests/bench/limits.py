"""What the limits cost a request, from its admission to its settling.

    PYTHONPATH=tests python -m bench.limits [--requests 5000] [--at-a-time 1]

One tenant with every limit set, high enough that nothing is refused; in one process' memory, and in a Redis on this
machine, which is waited for however long it takes. For each: the time of a request (median, 99th percentile), and
processor time of this process for one; and of Redis for a call of its script.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from loraplex.control.db.database import Database
from loraplex.control.limits.budget_store import BudgetStore
from loraplex.control.limits.budgets import Budgets
from loraplex.control.limits.in_process import InProcessLimiter
from loraplex.control.limits.limiter import Limiter
from loraplex.control.limits.redis_limiter import RedisLimiter
from loraplex.control.limits.redis_link import redis_script
from loraplex.control.limits.service import RequestLimits
from loraplex.control.types import Limits
from support.control.limit_watch import PatientLink, Watch
from support.control.plane import caller
from support.servers.redis_server import redis_server

PLENTY = 10**9
LIMITS = Limits(
    requests_per_minute=PLENTY, tokens_per_minute=PLENTY, max_concurrency=PLENTY, max_sequences=PLENTY
)
ASKED: dict[str, Any] = {"prompt_tokens": 100, "asked_tokens": 200, "default_tokens": 256, "n": 1}


def _redis() -> Limiter:
    server = redis_server()
    server.client.flushall()
    server.client.config_resetstat()
    return RedisLimiter(PatientLink(server.url, redis_script()), Watch())


async def _nobody(*_: Any) -> Any:
    raise AssertionError("the database was asked")


async def measure(make: Callable[[], Limiter], requests: int, at_a_time: int) -> str:
    limits = RequestLimits(make(), Budgets(BudgetStore(Database("sqlite://")), _nobody), server=LIMITS)
    await limits.start()
    who = caller("acme", key_limits=LIMITS, tenant_limits=LIMITS)
    seconds: list[float] = []

    async def run(worker: int) -> None:
        for number in range(requests // at_a_time):
            began = time.perf_counter()
            admission = await limits.admit(f"{worker}-{number}", who)
            await limits.reserve(admission, who, **ASKED)
            await limits.settle(admission, used_tokens=150)
            seconds.append(time.perf_counter() - began)

    processor, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(run, range(at_a_time)))
    processor, wall = time.process_time() - processor, time.perf_counter() - began
    await limits.close()
    cuts = statistics.quantiles(seconds, n=100)
    return (
        f"{statistics.median(seconds) * 1e6:.0f} µs (99%: {cuts[98] * 1e6:.0f} µs), "
        f"{processor / len(seconds) * 1e6:.0f} µs of this processor, {len(seconds) / wall:,.0f} requests a second"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-a-time", type=int, default=1)
    options = parser.parse_args()
    for name, kind in {"in memory": InProcessLimiter, "in Redis": _redis}.items():
        print(f"{name}: {asyncio.run(measure(kind, options.requests, options.at_a_time))}")
    calls = redis_server().client.info("commandstats")["cmdstat_evalsha"]
    print(f"Redis: {calls['usec_per_call']:.0f} µs a call")
