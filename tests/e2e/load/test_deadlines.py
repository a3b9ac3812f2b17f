"""A request whose time is over holds nothing a step or two later, on the real server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support.servers.live_server import LiveServer, Shop

pytestmark = pytest.mark.slow

MOST_STEPS = 4
"""The one that runs, the one that was planned meanwhile, and two while our own question travels."""


def ask(server: LiveServer, key: str, timeout_ms: int, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{server.data_port}/v1/completions",
        json={"model": "pirate", "prompt": "one", "max_tokens": 2000, "ignore_eos": True, **fields},
        headers={"Authorization": f"Bearer {key}", "x-loraplex-timeout-ms": str(timeout_ms)},
        timeout=60,
    )


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_all_sequences_of_a_late_request_end(real: Shop, stream: bool) -> None:
    server = real.server
    ask(server, real.key, 60_000, max_tokens=1)  # the adapter is there
    for timeout_ms in (4000, 12_000, 36_000):  # a busy machine takes longer for the first token
        answer = ask(server, real.key, timeout_ms, prompt=["one", "two"], n=2, stream=stream)
        before = server.stats()["num_steps"]
        server.wait(server.idle, timeout=60)
        assert server.stats()["num_steps"] - before <= MOST_STEPS
        if not stream or answer.status_code == 200:
            break
    if stream:
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert (answer.status_code, events[-1], len(events) > 2) == (200, "[DONE]", True)
        error = json.loads(events[-2])["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert answer.elapsed.total_seconds() < timeout_ms / 1000 + 16
