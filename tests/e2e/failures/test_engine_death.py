"""SIGKILL of the engine process: waiting clients get an error at once, the server stays, and the engine comes
back as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from support.servers.live_server import (
    ADAPTER_FILES,
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    SMALL,
    TINY_TORCH,
    LiveServer,
    checked,
    wait_gone,
    write_tiny_adapter,
)
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

TOLD_WITHIN_S = 10.0
"""Told at all, and not when a time-out ends it; how soon a quiet machine tells is measured by test_engine_kills."""


def complete(server: LiveServer, key: str, model: str) -> httpx.Response:
    with server.client(key) as client:
        return client.post("/v1/completions", json={"model": model, "prompt": "a b", "max_tokens": 4})


def wait_back(server: LiveServer, restarts: int) -> None:
    """Until the engine is up again; meanwhile, the server answers."""

    def back() -> bool:
        assert server.get("/livez") == 200
        assert server.get("/livez", admin=True) == 200
        engine = server.engine()
        return bool(engine["healthy"]) and engine["restarts"] == restarts

    server.wait(back, timeout=240)
    server.wait(lambda: server.get("/readyz") == 200)


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[tuple[LiveServer, str]]:
    """A server with three adapters, and a key for it."""
    with LiveServer(model, folder / "data", **TINY_TORCH) as server:
        server.create_tenant("acme")
        for seed, name in enumerate(("a", "b", "c")):
            server.upload("acme", name, write_tiny_adapter(folder / name, seed=seed))
        yield server, server.create_key("acme")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, str]]:
    """One for all. In the end its engine does not come back."""
    with serving(tiny_model, tmp_path_factory.mktemp("served")) as found:
        yield found


@pytest.mark.soak
def test_streams_on_the_real_model_are_told_and_hot_adapters_come_back(
    real_model_dir: Path, tmp_path: Path
) -> None:
    with LiveServer(real_model_dir, tmp_path / "data", served_model_name=SERVED_NAME, **SMALL) as server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        key = server.create_key("acme")
        hot = {f"{name}@v1": ["device", "host", "disk"] for name in EXAMPLES}
        models = [SERVED_NAME, *EXAMPLES] * 3
        for life in range(1, 4):  # again where the machine stood still until the engine was back
            streams = Streams(server, key, models, max_tokens=2000)
            streams.wait_until_all_run()
            server.wait(lambda: server.residency() == hot)

            killed_at = time.monotonic()
            # Its connection ends when the system has freed its memory, which takes long on a busy machine.
            wait_gone(server.kill_engine())
            gone_at = time.monotonic()
            streams.join()
            slowest = max(story.ended_at for story in streams.stories) - gone_at
            print(f"\n{len(models)} streams told of the engine's death within {slowest:.3f} s")
            assert slowest < TOLD_WITHIN_S
            for story in streams.stories:
                assert story.error["code"] == "engine_restarting"
                assert story.error["type"] == "server_error"
            refused, ready = complete(server, key, "pirate"), server.get("/readyz")
            if (refused.status_code, ready) == (503, 503):
                break
            wait_back(server, life)
        assert (refused.status_code, ready) == (503, 503)
        assert refused.json()["error"]["code"] == "engine_restarting"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/startupz") == 200
        assert checked(server.client(key).get("/v1/models"))["data"]  # needs no engine

        wait_back(server, life)
        print(f"engine back after {time.monotonic() - killed_at:.1f} s")
        server.wait(lambda: server.residency() == hot)
        for name in EXAMPLES:
            answer = complete(server, key, name)
            assert answer.status_code == 200
            assert answer.headers["x-loraplex-adapter-state"] == "hot"
        assert server.idle()


def test_an_idle_engine_that_dies_comes_back_each_time(served: tuple[LiveServer, str]) -> None:
    """Twice in a row; what was hot is hot again, what was pinned is pinned."""
    server, key = served
    checked(server.admin.put("tenants/acme/adapters/b/versions/v1/pin"))
    fingerprint = complete(server, key, "a").headers["x-loraplex-fingerprint"]
    expected = {name: complete_text(server, key, name) for name in ("a", "b", "tiny")}
    before = server.engine()["restarts"]
    for life in range(before + 1, before + 3):
        engine = server.kill_engine()
        wait_gone(engine)
        wait_back(server, life)
        assert server.engine_pid() not in (None, engine)
        server.wait(lambda: server.residency()["b@v1"] == ["device", "host", "disk"])
        server.wait(lambda: server.residency()["a@v1"] == ["device", "host", "disk"])
        assert {name: complete_text(server, key, name) for name in expected} == expected
        assert complete(server, key, "a").headers["x-loraplex-fingerprint"] == fingerprint


def complete_text(server: LiveServer, key: str, model: str) -> str:
    with server.client(key) as client:
        body = {"model": model, "prompt": "one two", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])


def test_requests_that_wait_or_are_on_their_way_are_told_too(served: tuple[LiveServer, str]) -> None:
    """Unstreamed requests get HTTP 503; none hangs, none becomes a 500."""
    server, key = served
    answers: list[httpx.Response] = []
    stop, before = threading.Event(), server.engine()["restarts"]

    def hammer(model: str) -> None:
        with server.client(key) as client:
            while not stop.is_set():
                body = {"model": model, "prompt": "one", "max_tokens": 3000, "ignore_eos": True}
                answers.append(client.post("/v1/completions", json=body))

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(hammer, model) for model in ["a", "b", "c", "tiny"] * 3]
        server.wait(lambda: server.stats()["num_running"] >= 8)
        killed_at = time.monotonic()
        server.kill_engine()
        server.wait(lambda: len(answers) >= 12)
        told_after = time.monotonic() - killed_at
        server.wait(lambda: len(answers) >= 40)
        stop.set()
        for future in futures:
            future.result(120)
    assert told_after < 2 * TOLD_WITHIN_S  # each has seen one answer, most of them the error
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) >= 12
    assert {answer.status_code for answer in refused} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    wait_back(server, before + 1)
    server.wait(server.idle)


def test_crash_loops_end_in_a_server_that_says_so(served: tuple[LiveServer, str]) -> None:
    """The fifth death within five minutes is the last, those of the tests before included: 503 with the reason, not a
    loop that burns the machine."""
    server, key = served

    def restarts_or_gave_up(before: int) -> bool:
        return bool(server.logged("engine_gave_up")) or server.engine()["restarts"] > before

    for _ in range(5):
        before = server.engine()["restarts"]
        server.wait(lambda: server.engine_pid() is not None)
        server.kill_engine()
        server.wait(partial(restarts_or_gave_up, before), timeout=60)
        if server.logged("engine_gave_up"):
            break
    assert len(server.logged("engine_gave_up")) == 1
    assert "died 5 times" in server.engine()["unhealthy_reason"]
    refused = complete(server, key, "a")
    assert refused.status_code == 503
    assert "died 5 times" in refused.json()["error"]["message"]
    assert server.get("/livez") == 200
    assert server.get("/readyz") == 503
    # An upload is taken, and waits for an engine that can check its numbers.
    folder = write_tiny_adapter(server.data_dir.parent / "d", seed=9)
    files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
    taken = checked(server.admin.post("tenants/acme/adapters/d/versions?wait=false", files=files), 202)
    assert (taken["version"], taken["state"]) == ("v1", "validating")
    assert server.stop() == 0
