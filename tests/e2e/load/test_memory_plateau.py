"""The engine's memory grows while its pools are touched for the first time, and then no more, whatever tenants ask."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.servers.live_server import SERVED_NAME, LiveServer, write_real_adapter

POOLS = {"kv_cache_memory": "128MiB", "adapter_memory": "48MiB", "adapter_cpu_memory": "32MiB"}

NUM_ADAPTERS = 6
"""Of some 15 MB each in bfloat16: more than the memory for them."""
STREAMS = 24
FIRST = 96
"""Requests that end before the plateau begins: twelve of each kind."""
MAX_GROWTH = 0.05
LONG = {"max_tokens": 64, "ignore_eos": True}
SENTENCE = "The quick brown fox jumps over the lazy dog. "
ASKED: dict[str, dict[str, Any]] = {
    "free": LONG,
    "choices": LONG | {"n": 4},
    "dictated": LONG | {"structured_outputs": {"regex": "a{2000}b"}},
    "dictated in parts": LONG | {"structured_outputs": {"regex": "(x{100}[ab])*"}},
    "long prompts": {"max_tokens": 2, "prompt": SENTENCE * 150},
    "scored prompts": {"max_tokens": 4, "prompt": SENTENCE * 60, "echo": True, "logprobs": 5},
    "biased": LONG | {"logit_bias": {str(token): -1 for token in range(300)}, "stop": ["zzzz"] * 4},
}


class Load:
    """`STREAMS` clients that ask for everything in turns; one in eight leaves early."""

    def __init__(self, server: LiveServer, key: str, models: list[str]) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(
            base_url=server.data_url, headers=headers, timeout=300, limits=limits
        )
        self._models = models
        self._turns = itertools.count()
        self.num_ended = 0

    async def run(self) -> None:
        async with self._client:
            await asyncio.gather(*(self._stream(random.Random(number)) for number in range(STREAMS)))

    async def _stream(self, chance: random.Random) -> None:
        while True:
            turn = next(self._turns)
            model = self._models[turn % len(self._models)]
            if turn % (len(ASKED) + 1) == len(ASKED):
                inputs = [[5 + (turn + place) % 9000] for place in range(200)]
                answer = await self._client.post("/v1/embeddings", json={"model": model, "input": inputs})
                assert answer.status_code == 200, answer.text
            else:
                body = list(ASKED.values())[turn % (len(ASKED) + 1)]
                await self._complete({"prompt": SENTENCE, **body, "model": model, "seed": turn}, turn, chance)
            self.num_ended += 1

    async def _complete(self, body: dict[str, Any], turn: int, chance: random.Random) -> None:
        body |= {"stream": True, "prompt": f"{turn}. {body['prompt']}"}
        leaves = chance.random() < 1 / 8
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for _ in answer.aiter_raw():
                if leaves:
                    return


async def watch(server: LiveServer, load: Load, seconds: float) -> tuple[int, int, int, int]:
    """Resident bytes of the engine: at the start, the most while the pools are filled, and the most in `seconds`
    behind that; and the requests that have ended."""
    pid = server.engine_pid()
    assert pid is not None
    engine = psutil.Process(pid)
    start, filled, later, end = engine.memory_info().rss, 0, 0, 0.0
    running = asyncio.create_task(load.run())
    try:
        while not end or time.monotonic() < end:
            await asyncio.sleep(0.25)  # the sampling interval
            if running.done():
                running.result()
            rss = engine.memory_info().rss
            stats = await asyncio.to_thread(server.stats)
            written = stats["prompt_tokens"] + stats["generation_tokens"] - stats["prefix_cache_hits"]
            if end:
                later = max(later, rss)
            else:
                filled = max(filled, rss)
                if load.num_ended >= FIRST and written >= 16 * stats["num_kv_blocks"]:
                    end = time.monotonic() + seconds
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return start, filled, later, load.num_ended


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_memory_ends_to_grow_where_the_pools_are_touched(real_model_dir: Path, tmp_path: Path) -> None:
    with LiveServer(
        real_model_dir, tmp_path / "data", served_model_name=SERVED_NAME, threads=0, **POOLS
    ) as server:
        server.create_tenant("acme")
        models = [SERVED_NAME]
        for seed in range(NUM_ADAPTERS):
            wide = ("q_proj", "k_proj", "v_proj", "o_proj")
            folder = write_real_adapter(tmp_path / f"a{seed}", seed=seed, rank=64, targets=wide)
            server.upload("acme", f"a{seed}", folder)
            models.append(f"a{seed}")
        load = Load(server, server.create_key("acme"), models)
        start, filled, later, ended = await watch(server, load, 60)
        server.wait(server.idle, 120)
        assert server.engine()["restarts"] == 0
    sizes = [f"{size / (1 << 20):.0f} MiB" for size in (start, filled, later)]
    summary = f"engine {sizes[0]} at the start, {sizes[1]} with its pools touched, {sizes[2]} later; {ended} requests"
    print("\n" + summary)
    assert later <= (1 + MAX_GROWTH) * filled, summary
