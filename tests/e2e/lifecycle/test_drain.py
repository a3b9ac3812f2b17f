"""SIGTERM to the server process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.live_server import TINY_TORCH, LiveServer, wait_gone
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow


class Starter:
    """Starts servers with one tenant and a key; reaps them."""

    def __init__(self, model: Path, adapter: Path, root: Path) -> None:
        self._model, self._adapter, self._root = model, adapter, root
        self.servers: list[LiveServer] = []

    def __call__(self, **settings: Any) -> tuple[LiveServer, str]:
        server = LiveServer(
            self._model, self._root / f"data-{len(self.servers)}", **{**TINY_TORCH, **settings}
        )
        self.servers.append(server)
        server.start()
        server.create_tenant("acme")
        server.upload("acme", "a", self._adapter)
        return server, server.create_key("acme")


@pytest.fixture
def start(tiny_model: Path, tiny_adapter: Path, tmp_path: Path) -> Any:
    starter = Starter(tiny_model, tiny_adapter, tmp_path)
    yield starter
    for server in starter.servers:
        server.reap()


Start = Callable[..., tuple[LiveServer, str]]


def complete(server: LiveServer, key: str) -> httpx.Response:
    with server.client(key) as client:
        return client.post("/v1/completions", json={"model": "a", "prompt": "x", "max_tokens": 2})


def test_a_drain_finishes_what_runs(start: Start) -> None:
    """A machine that stands still for longer than the grace gets a longer one."""
    tries = ((2, 3_000), (10, 20_000), (30, 60_000))
    assert any(drains(start, grace, max_tokens) for grace, max_tokens in tries), "all were too short"


def drains(start: Start, grace: int, max_tokens: int) -> bool:
    """Whether the grace, in seconds, outlasted what is asked in it, and streams of `max_tokens` tokens all that is."""
    server, key = start(drain_grace=grace)
    engine = server.engine_pid()
    assert engine is not None
    assert server.get("/readyz") == 200
    streams = Streams(server, key, ["a", "tiny"], max_tokens=max_tokens)
    streams.wait_until_all_run()
    server.signal(signal.SIGTERM)
    try:
        outlasted = keeps_serving_and_then_refuses(server, key)
    except (httpx.TransportError, AssertionError):
        if not server.logged("drained"):
            raise
        outlasted = False
    # By the server's word: with the last stream it ends, and clients may read for long what it has written by then.
    if not outlasted or server.logged("drained"):
        server.reap()
        streams.join()
        return False

    for story in streams.join(240):
        assert story.finished, story
        assert story.finish_reason == "length"
    assert server.wait_exit() == 0
    wait_gone(engine)
    (drained,) = server.logged("drained")
    assert drained["finished"] is True
    assert drained["cut"] == 0
    return True


def keeps_serving_and_then_refuses(server: LiveServer, key: str) -> bool:
    """Whether there was time for the first in the grace."""
    # The grace: not ready any more, and still serving.
    server.wait(lambda: server.get("/readyz") == 503)
    assert server.get("/readyz", admin=True) == 503
    assert server.get("/livez") == 200
    served = complete(server, key)
    if is_refused(served):
        return False
    assert served.status_code == 200
    assert served.headers["connection"] == "close"

    # After it: nothing new, while what runs goes on.
    server.wait(lambda: is_refused(complete(server, key)))
    refused = complete(server, key)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["connection"] == "close"
    return True


def is_refused(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and answer.json()["error"]["code"] == "draining"


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(start: Start, number: signal.Signals) -> None:
    server, key = start()
    assert complete(server, key).status_code == 200
    began = time.monotonic()
    server.signal(number)
    assert server.wait_exit() == 0
    assert time.monotonic() - began < 10
    assert "Traceback" not in server.log_path.read_text()


def test_a_second_signal_ends_it_at_once_and_streams_are_told(start: Start) -> None:
    server, key = start(drain_grace=30)
    streams = Streams(server, key, ["a", "tiny"], max_tokens=100_000)
    streams.wait_until_all_run()
    server.signal(signal.SIGTERM)
    server.wait(lambda: server.get("/readyz") == 503, timeout=10)
    server.signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.wait_exit() == 0
    assert time.monotonic() - began < 15
    for story in streams.join():
        assert story.error["code"] == "draining"


def test_unfinished_requests_are_told_at_the_deadline(start: Start) -> None:
    server, key = start(drain_timeout=1)
    whole: list[httpx.Response] = []

    def ask_whole() -> None:
        with server.client(key) as client:
            body = {"model": "a", "prompt": "x", "max_tokens": 100_000, "ignore_eos": True}
            whole.append(client.post("/v1/completions", json=body))

    asking = threading.Thread(target=ask_whole)
    asking.start()
    streams = Streams(server, key, ["a", "tiny"], max_tokens=100_000)
    streams.wait_until_all_run()
    server.wait(lambda: server.stats()["num_running"] == 3)
    assert server.stop() == 0
    for story in streams.join():
        assert story.error["code"] == "draining"
    asking.join(30)
    assert whole[0].status_code == 503
    assert whole[0].json()["error"]["code"] == "draining"
    (drained,) = server.logged("drained")
    assert drained["finished"] is False
    assert drained["cut"] == 3


def test_a_signal_while_the_engine_starts(tiny_model: Path, tmp_path: Path) -> None:
    server = LiveServer(tiny_model, tmp_path / "data", **TINY_TORCH)
    try:
        server.start(wait=False)
        server.wait(lambda: server.engine_pid() is not None)
        engine = server.engine_pid()
        assert engine is not None
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10
        wait_gone(engine)
        assert "Traceback" not in server.log_path.read_text()
    finally:
        server.reap()
