"""One tenant has a prompt as long as the context scored while another tenant's stream goes on."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.servers.live_server import SERVED_NAME, LiveServer
from support.servers.live_streams import Neighbour, print_gaps

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

CONTEXT = 8192
VOCAB = 49152
SCORED = {"echo": True, "logprobs": 5, "max_tokens": 0}
MAX_GROWTH = 320 << 20
"""Of the engine's memory: a step's logits of 341 positions are kept as float32 (64 MiB), and worked on."""
MAX_FRAME = 256 << 10


@pytest.fixture
def server(real_model_dir: Path, tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(
        real_model_dir, tmp_path / "data", served_model_name=SERVED_NAME, kv_cache_memory="640MiB"
    ) as made:
        yield made


@contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """Its resident bytes, every 20 ms."""
    process, done, seen = psutil.Process(pid), threading.Event(), [psutil.Process(pid).memory_info().rss]

    def watch() -> None:
        while not done.wait(0.02):
            seen.append(process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def ask(server: LiveServer, key: str, num_tokens: int, fields: dict[str, Any]) -> tuple[bytes, int]:
    """An answer to a prompt that nobody has asked for, and the largest of its events."""
    chance = random.Random(num_tokens)
    body = {
        "model": SERVED_NAME,
        "prompt": [chance.randrange(100, VOCAB) for _ in range(num_tokens)],
        **fields,
    }
    with server.client(key) as client:
        answer = client.post("/v1/completions", json=body, timeout=900)
    assert answer.status_code == 200, answer.text[:300]
    if "stream" not in fields:
        return answer.content, 0
    events = answer.content.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return answer.content, max(map(len, events))


@pytest.mark.parametrize(
    ("what", "num_tokens", "fields"),
    [
        ("not scored", CONTEXT - 1, {"max_tokens": 1}),
        ("scored", CONTEXT, SCORED),
        ("scored and streamed", CONTEXT // 4, {**SCORED, "stream": True}),
    ],
)
def test_a_long_prompt_beside_a_stream(
    server: LiveServer, what: str, num_tokens: int, fields: dict[str, Any]
) -> None:
    keys = {}
    for tenant in ("acme", "rival"):
        server.create_tenant(tenant)
        keys[tenant] = server.create_key(tenant)
    engine = server.engine_pid()
    assert engine is not None
    with Neighbour(server, keys["acme"]) as neighbour:
        server.wait(lambda: len(neighbour.times) > 20)
        before = server.stats()["num_steps"]
        with peak_memory(engine) as seen:
            began = time.monotonic()
            content, largest = ask(server, keys["rival"], num_tokens, fields)
            ended = time.monotonic()
        steps = server.stats()["num_steps"] - before
        gaps = neighbour.gaps(began, ended)
        growth = max(seen) - seen[0]
        print_gaps(
            f"{num_tokens} tokens {what}, in {ended - began:.1f} s and {steps} steps: engine +{growth >> 20} MiB, "
            f"answer {len(content)} bytes, its largest event {largest}; neighbour",
            gaps,
        )
    # The neighbour has its token in each step; a few are of the moments before and after.
    assert len(gaps) >= steps - 5
    assert growth < MAX_GROWTH
    assert largest < MAX_FRAME
    if fields == SCORED:
        told = json.loads(content)["choices"][0]["logprobs"]
        assert [len(values) for values in told.values()] == [CONTEXT] * 4
    assert server.engine_pid() == engine
