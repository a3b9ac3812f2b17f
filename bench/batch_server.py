"""Measures what a batch costs streams at a whole server, and how fast it is alone, by the wall's clock.

    PYTHONPATH=tests python -m bench.batch_server MODEL [--pairs 5]

Beside: clients with one stream at a time each, without a batch of 5,000 lines and beside it in turns. Alone: a batch,
and the same requests from 64 clients, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx

from support.servers.live_server import SMALL, LiveServer

NUMBERS = count()
BESIDE_LINES, ALONE_LINES, CLIENTS = 5000, 400, 64
ENDED = ("completed", "failed", "cancelled", "expired")


def body(most: int, **more: Any) -> dict[str, Any]:
    number = next(NUMBERS)
    prompt = " ".join(str((number * 7919 + place * 104729) % 997) for place in range(16))
    return {
        "model": "base",
        "prompt": prompt,
        "max_tokens": most,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }


async def chunks(client: httpx.AsyncClient) -> AsyncIterator[float]:
    asked = body(24 + next(NUMBERS) % 17, stream=True)
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        async for text in answer.aiter_lines():
            if text.startswith("data: {"):
                yield time.perf_counter()


async def stream(client: httpx.AsyncClient, until: float, firsts: list[float], gaps: list[float]) -> None:
    while (begun := time.perf_counter()) < until:
        times = [at async for at in chunks(client)]
        firsts.append(times[0] - begun)
        gaps += [b - a for a, b in pairwise(times)]


async def figures(client: httpx.AsyncClient, streams: int, seconds: float) -> list[float]:
    """Milliseconds of first tokens and gaps, median and 99th percentile of each."""
    firsts: list[float] = []
    gaps: list[float] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(stream(client, until, firsts, gaps) for _ in range(streams)))
    quantiles = [statistics.quantiles(values, n=100, method="inclusive") for values in (firsts, gaps)]
    return [1000 * found[place] for found in quantiles for place in (49, 98)]


async def submit(client: httpx.AsyncClient, lines: int) -> str:
    asked = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": body(32)}
        for n in range(lines)
    ]
    text = "\n".join(json.dumps(line) for line in asked).encode()
    sent = await client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"})
    made = {
        "input_file_id": sent.json()["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return str((await client.post("/v1/batches", json=made)).json()["id"])


async def ended(client: httpx.AsyncClient, batch: str) -> Any:
    while True:
        found = (await client.get(f"/v1/batches/{batch}")).json()
        if found["status"] in ENDED:
            return found["request_counts"]
        await asyncio.sleep(0.2)


async def beside(client: httpx.AsyncClient, options: argparse.Namespace) -> None:
    ratios = []
    for _ in range(options.pairs):
        without = await figures(client, options.streams, options.seconds)
        batch = await submit(client, BESIDE_LINES)
        await asyncio.sleep(2.0)
        among = await figures(client, options.streams, options.seconds)
        await client.post(f"/v1/batches/{batch}/cancel")
        done = (await ended(client, batch))["completed"]
        ratios.append([b / a for a, b in zip(without, among, strict=True)])
        print([f"{a:.1f}" for a in without], [f"{a:.1f}" for a in among], f"ms; {done} lines", flush=True)
        await asyncio.sleep(2.0)
    medians = [f"{statistics.median(column):.3f}" for column in zip(*ratios, strict=True)]
    print("beside ÷ without, first token p50, p99, gap p50, p99, median of pairs:", medians)


async def alone(client: httpx.AsyncClient, options: argparse.Namespace) -> None:
    ratios = []
    for _ in range(options.pairs):
        begun, left = time.perf_counter(), iter(range(ALONE_LINES))

        async def ask(left: Any = left) -> None:
            for _ in left:
                (await client.post("/v1/completions", json=body(32))).raise_for_status()

        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
        asked = time.perf_counter() - begun
        await asyncio.sleep(1.5)
        begun = time.perf_counter()
        counts = await ended(client, await submit(client, ALONE_LINES))
        batch = time.perf_counter() - begun
        assert counts["completed"] == ALONE_LINES, counts
        ratios.append(asked / batch)
        print(
            f"{ALONE_LINES} requests of {CLIENTS} clients {asked:.1f} s, as a batch {batch:.1f} s", flush=True
        )
    print(f"a batch's speed ÷ that of the clients, median of pairs: {statistics.median(ratios):.3f}")


async def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a batch costs streams at a server, and its speed alone."
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        sizes = {**SMALL, "threads": 2, "max_num_seqs": CLIENTS, "max_model_len": 512}
        with LiveServer(options.model, Path(work) / "data", served_model_name="base", **sizes) as server:
            server.create_tenant("acme")
            key = {"authorization": f"Bearer {server.create_key('acme')}"}
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(
                base_url=server.data_url, headers=key, timeout=600, limits=limits
            ) as client:
                await figures(client, options.streams, 3.0)
                await beside(client, options)
                await alone(client, options)


if __name__ == "__main__":
    asyncio.run(main())
