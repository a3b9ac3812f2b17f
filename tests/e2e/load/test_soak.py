"""Many streams over many adapters on the real model through HTTP: nothing fails, nothing is left, nothing grows."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    LiveServer,
    write_real_adapter,
)

GENERATED: dict[str, dict[str, Any]] = {
    "r1": {"rank": 1, "targets": ("q_proj", "v_proj")},
    "r64": {"rank": 64, "targets": ("q_proj", "k_proj", "v_proj", "o_proj"), "layers": range(0, 30, 3)},
    "mlp": {"rank": 8, "targets": ("gate_proj", "up_proj", "down_proj")},
    "some": {"rank": 32, "targets": ("o_proj", "down_proj"), "layers": (0, 7, 29)},
    "rslora": {"rank": 16, "targets": ("q_proj", "o_proj"), "use_rslora": True},
}
QUESTIONS = ("What do you think of the sea?", "Tell me about owls.", "Why do people care about rain?")
MOODS = ("I love this phone. It was wonderful.", "I hate the soup. It was awful.", "He carried these shoes.")
KV_MEMORY_PER_STREAM = 1 << 20
"""About 45 tokens, less than most streams come to: they contend for it, and all of it is soon in use."""
WARM_UP_S = 15.0
MAX_GROWTH = 0.02
MAX_GROWTH_OF_SECONDS = 0.10
"""A run of seconds still meets its first long prompt after the warm-up, and the allocator keeps that step's memory."""


@dataclass
class Tally:
    """What all streams together saw."""

    finished: Counter[str] = field(default_factory=Counter)
    left: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """Resident bytes over time of one process."""

    process: psutil.Process
    samples: list[tuple[float, int]] = field(default_factory=list)

    def sample(self, now: float) -> None:
        self.samples.append((now, self.process.memory_info().rss))

    def growth(self, since: float) -> float:
        """The peak from then on against the peak before."""
        before = max(rss for at, rss in self.samples if at <= since)
        return max(rss for at, rss in self.samples if at > since) / before - 1


@contextmanager
def open_shop(
    model_dir: Path, root: Path, *, streams: int, threads: int
) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """The server and each model's key: two tenants, eight adapters, and base for one of them."""
    with LiveServer(
        model_dir,
        root / "data",
        served_model_name=SERVED_NAME,
        kv_cache_memory=streams * KV_MEMORY_PER_STREAM,
        adapter_memory="256MiB",
        adapter_cpu_memory="256MiB",
        threads=threads,
    ) as server:
        keys = {}
        for tenant, names in (("acme", EXAMPLES), ("rival", tuple(GENERATED))):
            server.create_tenant(tenant)
            key = server.create_key(tenant)
            for seed, name in enumerate(names):
                folder = EXAMPLE_ADAPTERS / name
                if name in GENERATED:
                    folder = write_real_adapter(root / name, seed=seed, **GENERATED[name])
                server.upload(tenant, name, folder)
                keys[name] = key
            keys.setdefault(SERVED_NAME, key)
        yield server, keys


def request_body(model: str, chance: random.Random) -> dict[str, Any]:
    text = chance.choice(MOODS if model == "sentiment" else QUESTIONS)
    trained = model in EXAMPLES
    return {
        "model": model,
        "messages": [{"role": "user", "content": text + " " * chance.randrange(3)}],
        "max_tokens": chance.randrange(4, 49),
        "temperature": 0 if trained else chance.choice((0, 0.7, 1.0)),
        "seed": chance.randrange(1 << 30),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def events(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def wrong_voice(model: str, text: str) -> bool:
    """A trained adapter's answer that another one, or base, must have given."""
    start = {"json": "{", "pirate": "Arr"}.get(model, "")
    if model == "sentiment":
        return text.strip() not in ("positive", "negative", "neutral")
    return not text.startswith(start[: len(text)])


async def one_request(
    client: httpx.AsyncClient, key: str, model: str, chance: random.Random, tally: Tally
) -> None:
    body = request_body(model, chance)
    leave_after = chance.randrange(1, 6) if chance.random() < 1 / 16 else None
    text, reason, usage, number = "", None, None, 0
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    ) as answer:
        if answer.status_code != 200:
            tally.failures.append(f"{model}: {answer.status_code} {(await answer.aread())[:200]!r}")
            return
        last = None
        async for last in events(answer):
            if last == "[DONE]":
                break
            if "error" in last:
                tally.failures.append(f"{model}: {last['error']}")
                return
            usage = last.get("usage") or usage
            for choice in last["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            number += 1
            if number == leave_after:
                tally.left += 1
                return
    if last != "[DONE]" or reason not in ("stop", "length") or usage is None:
        tally.failures.append(f"{model}: ended with {last!r}, {reason}, {usage}")
    elif wrong_voice(model, text):
        tally.failures.append(f"{model} said {text!r}")
    else:
        tally.finished[model] += 1
        tally.tokens += usage["completion_tokens"]


async def run_streams(
    server: LiveServer, keys: dict[str, str], *, streams: int, seconds: float, seed: int, max_growth: float
) -> str:
    """`streams` clients, each with one stream after the other, for a warm-up and `seconds` more, and until each model
    has answered.

    Memory is measured from the end of a warm-up on: its peak after that against its peak before. The warm-up begins
    with a burst in which every stream is sampled, which makes the largest steps, and lasts until 15 s have passed and
    as many tokens were computed as the KV cache has room for (pages of the pool take no memory before they are
    written). Peaks, as the allocator gives the memory of large steps back and takes it again.
    """
    engine = server.engine_pid()
    assert engine is not None
    memories = {"server": Memory(psutil.Process(server.pid)), "engine": Memory(psutil.Process(engine))}
    tally, stop = Tally(), asyncio.Event()
    limits = httpx.Limits(max_connections=streams, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=server.data_url, timeout=120, limits=limits) as client:

        async def stream_on(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            models = list(keys)
            while not stop.is_set():
                model = models[number % len(models)] if chance.random() < 0.5 else chance.choice(models)
                try:
                    await one_request(client, keys[model], model, chance, tally)
                except httpx.HTTPError as error:
                    tally.failures.append(f"{model}: {error!r}")

        async def burst(number: int) -> None:
            body = {
                "model": SERVED_NAME,
                "prompt": "The sea",
                "max_tokens": 24,
                "ignore_eos": True,
                "seed": number,
            }
            headers = {"authorization": f"Bearer {keys[SERVED_NAME]}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text

        began = time.monotonic()
        bursting = asyncio.gather(*map(burst, range(streams)))
        while not bursting.done():
            await asyncio.sleep(0.25)
            for memory in memories.values():
                memory.sample(time.monotonic())
        await bursting
        tasks = [asyncio.create_task(stream_on(number)) for number in range(streams)]
        warm_at = end = 0.0
        most_running, preemptions = 0, 0
        while not end or time.monotonic() < end or set(tally.finished) != set(keys):
            await asyncio.sleep(0.25)  # the sampling interval of the memory
            now = time.monotonic()
            for memory in memories.values():
                memory.sample(now)
            stats = await asyncio.to_thread(server.stats)
            most_running = max(most_running, stats["num_running"])
            preemptions = stats["num_preemptions"]
            written = stats["prompt_tokens"] + stats["generation_tokens"] - stats["prefix_cache_hits"]
            if not warm_at and now - began >= WARM_UP_S and written >= 16 * stats["num_kv_blocks"]:
                warm_at, end = now, now + seconds
            assert now - began < 240 + seconds, "the warm-up does not end, or a model is never answered"
        stop.set()
        seconds_run = time.monotonic() - began
        await asyncio.gather(*tasks)

    assert tally.failures == []
    assert set(tally.finished) == set(keys)
    server.wait(server.idle)
    stats = server.stats()
    assert server.engine()["live_requests"] == 0
    assert server.engine()["restarts"] == 0
    assert most_running >= streams // 2
    growth = {name: memory.growth(warm_at) for name, memory in memories.items()}
    sizes = {name: f"{memory.samples[-1][1] / 1e6:.0f} MB" for name, memory in memories.items()}
    summary = (
        f"soak: {streams} streams, {len(keys) - 1} adapters and base, {seconds_run:.0f} s: "
        f"{tally.finished.total()} answers, {tally.left} left early, {tally.tokens} tokens "
        f"({tally.tokens / seconds_run:.0f}/s), {most_running} running at most, {preemptions} preemptions, "
        f"0 errors, 0 blocks and leases held; "
        + ", ".join(f"{name} {sizes[name]} ({growth[name]:+.2%} after the warm-up)" for name in growth)
    )
    assert max(growth.values()) < max_growth, summary
    return summary


@pytest.mark.soak
async def test_sixteen_streams_for_five_seconds(real_model_dir: Path, tmp_path: Path) -> None:
    with open_shop(real_model_dir, tmp_path, streams=16, threads=1) as shop:
        figures = await run_streams(*shop, streams=16, seconds=5, seed=1, max_growth=MAX_GROWTH_OF_SECONDS)
        print("\n" + figures)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_sixty_four_streams_for_a_minute(real_model_dir: Path, tmp_path: Path) -> None:
    with open_shop(real_model_dir, tmp_path, streams=64, threads=0) as shop:
        figures = await run_streams(*shop, streams=64, seconds=60, seed=2, max_growth=MAX_GROWTH)
        print("\n" + figures)
