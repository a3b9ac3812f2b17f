"""A client that goes away: what it held is free again within a step or two."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from support.servers.live_server import EXAMPLES, SERVED_NAME, LiveServer, Shop, checked
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

LONG = "The sea and the ships on it. " * 200
"""About 1600 tokens: three steps of prefill and more."""
MOST_STEPS = 4
"""The one that runs, the one that was planned meanwhile, and two while the hang-up and our own question travel."""


def open_request(server: LiveServer, key: str, **fields: Any) -> socket.socket:
    """A request on a raw connection; nothing is read."""
    body = json.dumps({"prompt": "one", "max_tokens": 2000, "ignore_eos": True, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sock = socket.create_connection(("127.0.0.1", server.data_port), timeout=60)
    sock.sendall(head.encode() + body)
    return sock


def read_events(sock: socket.socket, count: int) -> None:
    received = b""
    while received.count(b"data: ") < count:
        piece = sock.recv(1 << 16)
        assert piece, received
        received += piece


def hang_up(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def steps_until_idle(server: LiveServer) -> int:
    """Steps of the engine from now until nothing runs, waits, is leased or holds a block."""
    before = server.stats()["num_steps"]
    server.wait(server.idle, timeout=60)
    return int(server.stats()["num_steps"] - before)


def test_mid_stream(real: Shop) -> None:
    """Base and three adapters at once. A step of the real model takes far longer than a hang-up travels."""
    server = real.server
    models = (SERVED_NAME, *EXAMPLES)
    sockets = [open_request(server, real.key, model=model, stream=True) for model in models]
    for sock in sockets:
        read_events(sock, 3)
    stats = server.stats()
    assert stats["num_running"] == stats["num_leases"] + 1 == len(models)
    assert stats["num_kv_blocks_used"] >= len(models)
    hang_up(sockets)
    assert steps_until_idle(server) <= MOST_STEPS


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(real: Shop, stream: bool) -> None:
    server = real.server
    chance = random.Random(stream)
    sockets = [
        open_request(server, real.key, model=model, stream=stream, prompt=f"{chance.random()} {LONG}")
        for model in ("pirate", SERVED_NAME)
    ]
    server.wait(lambda: server.stats()["num_running"] > 0)
    hang_up(sockets)
    assert steps_until_idle(server) <= MOST_STEPS
    # Another one's answer is what it is without all that.
    with real.client() as client:
        body = {"model": SERVED_NAME, "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
        assert "Paris" in checked(client.post("/v1/completions", json=body))["choices"][0]["text"]


def test_hang_up_in_the_queue(tiny: Shop) -> None:
    """More requests than a step takes; those that wait and those that run all hang up."""
    server = tiny.server
    sockets = [
        open_request(server, tiny.key, model=("a", "tiny")[n % 2], stream=bool(n % 3), max_tokens=100_000)
        for n in range(100)
    ]
    server.wait(lambda: server.stats()["num_running"] == 64 and server.stats()["num_waiting"] == 36)
    hang_up(sockets)
    server.wait(server.idle, timeout=30)  # their answers would take minutes
    assert server.engine()["live_requests"] == 0


def test_many_hang_ups_at_any_moment_harm_no_neighbour(tiny: Shop) -> None:
    server, chance = tiny.server, random.Random(5)
    with server.client(tiny.key) as client:
        body = {"model": "a", "prompt": "one", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        expected = checked(client.post("/v1/completions", json=body))["choices"][0]["text"][:200]
    neighbours = Streams(server, tiny.key, ["a", "a"], max_tokens=1500)
    neighbours.wait_until_all_run()
    for _ in range(40):
        sock = open_request(
            server,
            tiny.key,
            model=chance.choice(("a", "tiny")),
            stream=chance.random() < 0.7,
            n=chance.choice((1, 2)),
        )
        sock.settimeout(chance.random() * 0.02)
        try:
            while sock.recv(1 << 12):
                pass
        except TimeoutError:
            pass
        sock.close()
    for story in neighbours.join(120):
        assert story.finished
        assert story.text[:200] == expected
    server.wait(server.idle)
    assert server.engine()["live_requests"] == 0
