"""Two servers on one PostgreSQL, one pepper and one artifact store, each with its own data directory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.servers.live_server import (
    SERVE,
    TINY_SIZES,
    LiveServer,
    checked,
    run_serve,
    write_tiny_adapter,
    write_tiny_model,
)
from support.servers.postgres import need_programs, postgres_server

pytestmark = pytest.mark.slow
PEPPER = "5a" * 32
PROMISED_S = 5.0
NUM_STREAMS = 64
TRIES = 3
"""A machine that stands still for seconds is no fault of the servers'."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., LiveServer]]:
    need_programs()
    model, url = write_tiny_model(tmp_path / "model"), postgres_server().create_database()
    shared = {"database_url": url, "artifact_url": f"file://{tmp_path / 'artifacts'}"}
    made: list[LiveServer] = []

    def server(name: str, **settings: Any) -> LiveServer:
        environment = {"LORAPLEX_KEY_PEPPER": PEPPER}
        given = shared | TINY_SIZES | settings
        made.append(LiveServer(model, tmp_path / name, environment=environment, **given))
        return made[-1]

    yield server
    for one in made:
        one.reap()


def ask(server: LiveServer, key: str, model: str) -> int:
    with server.client(key) as client:
        return client.post(
            "/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1}
        ).status_code


def seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < 12 * PROMISED_S
        time.sleep(0.05)
    return time.monotonic() - began


def test_changes_on_one_server_reach_the_other(servers: Callable[..., LiveServer], tmp_path: Path) -> None:
    first, second = servers("first"), servers("second")
    staging = tmp_path / "artifacts" / "staging"
    (staging / "of-a-crash").mkdir(parents=True)
    first.start()
    assert list(staging.iterdir()) == []
    first.create_tenant("acme")
    first.create_tenant("rival")
    key, other, ended = first.create_key("acme"), first.create_key("acme"), first.create_key("rival")
    first.upload("acme", "pirate", write_tiny_adapter(tmp_path / "pirate"))
    on_its_way = staging / "of-the-first-server"
    on_its_way.mkdir()
    second.start()
    assert on_its_way.is_dir(), "the second swept away what the first was receiving"
    assert second.logged("store_not_swept")
    assert [ask(server, key, "pirate") for server in (first, second)] == [200, 200]
    assert ask(second, other, "pirate") == 200
    assert ask(second, ended, "pirate") == 404

    checked(first.admin.delete(f"tenants/acme/keys/{key.split('_')[1]}"), 204)
    checked(first.admin.delete("tenants/rival"), 200)
    assert ask(first, key, "pirate") == 401
    checked(first.admin.patch("tenants/acme", json={"limits": {"requests_per_minute": 1}}))

    def heard() -> bool:
        answers = [ask(second, secret, "pirate") for secret in (key, ended, other)]
        return answers == [401, 401, 429]

    took = seconds_until(heard)
    for _ in range(1, TRIES):
        if took < PROMISED_S:
            break
        key = first.create_key("acme")
        seconds_until(lambda key=key: ask(second, key, "pirate") == 429)  # type: ignore[misc]
        checked(first.admin.delete(f"tenants/acme/keys/{key.split('_')[1]}"), 204)
        took = seconds_until(heard)
    assert took < PROMISED_S
    print(f"revoked, deleted and limited on one, refused on the other after {took:.1f} s")
    checked(first.admin.patch("tenants/acme", json={"limits": {"requests_per_minute": None}}))

    seconds_until(lambda: ask(second, other, "pirate") == 200)  # the limit is gone there too
    second.upload("acme", "pirate", write_tiny_adapter(tmp_path / "better", seed=2))
    change_under_streams(first, second, other)

    stranger = second.command[len(SERVE) :]
    stranger[stranger.index("--data-dir") + 1] = str(tmp_path / "stranger")
    for option in ("--port", "--admin-port"):
        stranger[stranger.index(option) + 1] = "0"
    outcome = run_serve(*stranger, environment={"LORAPLEX_KEY_PEPPER": "00" * 32})
    assert outcome.code == 1
    assert "key pepper" in outcome.said[0]
    assert "00" * 32 not in outcome.stderr


def change_under_streams(first: LiveServer, second: LiveServer, key: str) -> None:
    """64 clients stream one answer after the other while the second server promotes v2, each until it gets v2. None is
    refused, each answer is whole and of the one version that its header names, and v1 answers nothing that was asked
    5 s after the change."""
    begun = threading.Event()

    def follow(number: int) -> list[tuple[float, str, str]]:
        seen: list[tuple[float, str, str]] = []
        while not seen or seen[-1][1] == "pirate@v1":
            asked = time.monotonic()
            seen.append((asked, *stream((first, second)[number % 2], key, "pirate", number)))
            begun.set()
        return seen

    def alone(number: int) -> dict[str, str]:
        return dict(stream(first, key, f"pirate@v{version}", number) for version in (1, 2))

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        following = [pool.submit(follow, number) for number in range(NUM_STREAMS)]
        assert begun.wait(60)
        checked(second.admin.post("tenants/acme/adapters/pirate/release/promote"))
        changed = time.monotonic()
        answers = [client.result() for client in following]
        texts = list(pool.map(alone, range(NUM_STREAMS)))
    assert any(len(seen) > 1 for seen in answers), "v1 answered nothing"
    assert sum(one["pirate@v1"] != one["pirate@v2"] for one in texts) > NUM_STREAMS / 2
    for seen, known in zip(answers, texts, strict=True):
        for asked, version, text in seen:
            assert text == known[version]
            assert version == "pirate@v2" or asked < changed + PROMISED_S


def stream(server: LiveServer, key: str, model: str, number: int) -> tuple[str, str]:
    """The version that answered, and its answer."""
    body = {
        "model": model,
        "prompt": f"user {number}",
        "max_tokens": 32,
        "ignore_eos": True,
        "temperature": 0,
    }
    text = ""
    with server.client(key) as client:
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return answer.headers["x-loraplex-adapter"], text


@pytest.mark.soak
def test_two_servers_never_overspend_a_shared_budget(servers: Callable[..., LiveServer]) -> None:
    """Not all at once either, and not when one is killed; one that ends in order gives back what it holds."""
    first, second = (servers(name, kernels="torch") for name in ("first", "second"))
    first.start()
    second.start()
    first.create_tenant("acme", limits={"token_budget": 400, "budget_period": "forever"})
    key = first.create_key("acme")

    def use(number: int) -> tuple[int, int]:
        with (first, second)[number % 2].client(key) as client:
            body = {"model": "model", "prompt": "x", "max_tokens": 9, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
        told = answer.json()
        return answer.status_code, told["usage"]["total_tokens"] if answer.status_code == 200 else 0

    with ThreadPoolExecutor(8) as pool:
        early = list(pool.map(use, range(20)))
    assert {status for status, _ in early} <= {200, 429}
    second.kill()
    spent = sum(tokens for _, tokens in early)
    while True:
        status, tokens = use(0)
        spent += tokens
        assert spent <= 400
        if status != 200:
            break
    assert status == 429
    first.stop()
    first.start()
    budget = checked(first.admin.get("tenants/acme"))["budget"]
    assert budget["spent"] + budget["held"] <= 400
    assert spent <= 400 - budget["left"]
    print(f"{spent} of 400 tokens answered, {budget['held']} held by the server that was killed")
