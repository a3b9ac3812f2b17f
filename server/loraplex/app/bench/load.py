"""The two ways to put load on a server: a closed loop of workers, and Poisson arrivals independent of the answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx

from loraplex.app.bench.client import Asking, Outcome, ask
from loraplex.app.bench.workload import BenchRequest, Workload


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` workers that each ask again as soon as they are answered, unless the workload has a rate. The
    run ends after `num_requests` requests, or when `duration_s` has passed and those that were begun have ended,
    whichever comes first; at least one of the two is set. `warmup` requests a model are asked before, one at a
    time, and not counted."""

    concurrency: int = 1
    num_requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("a run needs a number of requests or a duration")


@dataclass(frozen=True, slots=True)
class Run:
    """The measurements of a run. `wall_s` is from the first request's due time to the last answer's end."""

    outcomes: tuple[Outcome, ...]
    wall_s: float


async def run_load(
    client: httpx.AsyncClient,
    workload: Workload,
    load: Load,
    asking: Asking,
    on_done: Callable[[Outcome], None] = lambda _outcome: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Ask everything; `on_done` hears of each answer as it ends."""
    # Another seed: a warm-up prompt must not be in the prefix cache for a measured one.
    warming = replace(workload, seed=-1 - workload.seed).requests()
    for model in dict.fromkeys(workload.models):
        for request in itertools.islice(warming, load.warmup):
            await ask(client, asking, replace(request, model=model), clock(), clock)
    requests = itertools.islice(workload.requests(), load.num_requests)
    start = clock()
    end = None if load.duration_s is None else start + load.duration_s
    if workload.rate is None:
        outcomes = await _closed_loop(client, requests, load.concurrency, end, asking, on_done, clock)
    else:
        outcomes = await _open_loop(client, requests, start, end, asking, on_done, clock)
    wall = max((o.done for o in outcomes), default=start) - min((o.due for o in outcomes), default=start)
    return Run(tuple(outcomes), wall)


async def _closed_loop(
    client: httpx.AsyncClient,
    requests: Iterator[BenchRequest],
    concurrency: int,
    end: float | None,
    asking: Asking,
    on_done: Callable[[Outcome], None],
    clock: Callable[[], float],
) -> list[Outcome]:
    outcomes: list[Outcome] = []

    async def work() -> None:
        for request in requests:
            now = clock()
            if end is not None and now >= end:
                return
            outcome = await ask(client, asking, request, now, clock)
            outcomes.append(outcome)
            on_done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return outcomes


async def _open_loop(
    client: httpx.AsyncClient,
    requests: Iterator[BenchRequest],
    start: float,
    end: float | None,
    asking: Asking,
    on_done: Callable[[Outcome], None],
    clock: Callable[[], float],
) -> list[Outcome]:
    # Latency counts from the due time: a request that we or a full server held up is not measured as if it had
    # been sent later (no coordinated omission).
    outcomes: list[Outcome] = []

    async def work(request: BenchRequest, due: float) -> None:
        outcome = await ask(client, asking, request, due, clock)
        outcomes.append(outcome)
        on_done(outcome)

    async with asyncio.TaskGroup() as group:
        for request in requests:
            due = start + request.arrival_s
            if end is not None and due >= end:
                break
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            group.create_task(work(request, due))
    return outcomes
