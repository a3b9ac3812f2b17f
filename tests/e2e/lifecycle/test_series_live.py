"""A series on a live server: its versions in one batch while another comes, and its neighbours beside a flood."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.servers.live_server import TINY_SIZES, LiveServer, checked, write_tiny_adapter
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

SCOPES = ["inference", "adapters:read", "adapters:write", "adapters:train"]
KEPT, TOKENS = 8, 800


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    work = tmp_path_factory.mktemp("revisions")
    return [write_tiny_adapter(work / str(seed), seed=seed, scale=1.0) for seed in range(KEPT + 1)]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    data = tmp_path_factory.mktemp("series") / "data"
    with LiveServer(tiny_model, data, dtype="float32", **TINY_SIZES) as server:
        yield server


def begin_series(client: httpx.Client, tenant: str, name: str, adapter: Path, keep_last: int) -> str:
    """Make a series; the path of its pushes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    path = f"/admin/v1/tenants/{tenant}/adapters/{name}/series"
    rules = {"keep_last": keep_last, "check_every": 1000, "config": config}
    checked(client.put(path, json=rules))
    return f"{path}/versions"


def push(client: httpx.Client, path: str, adapter: Path) -> httpx.Response:
    tensors = (adapter / "adapter_model.safetensors").read_bytes()
    return client.post(path, content=tensors, headers={"content-type": "application/octet-stream"})


def text(client: httpx.Client, model: str, max_tokens: int) -> str:
    asked = {"model": model, "prompt": "one", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return str(checked(client.post("/v1/completions", json=asked))["choices"][0]["text"])


def test_eight_revisions_run_in_one_batch_while_a_ninth_is_pushed(
    server: LiveServer, adapters: list[Path]
) -> None:
    """Each request goes on with the version with which it began, also where that is not kept any more."""
    server.create_tenant("acme")
    key = server.create_key("acme", scopes=SCOPES)
    with server.client(key) as client:
        # What is expected comes of ordinary uploads of the same bytes, each alone in its batch.
        truth = [server.upload("acme", "truth", adapter)["version"] for adapter in adapters]
        expected = [text(client, f"truth@{version}", TOKENS) for version in truth]
        assert len(set(expected)) == len(expected)
        checked(server.admin.delete("tenants/acme/adapters/truth"), 204)

        path = begin_series(client, "acme", "run", adapters[0], KEPT)
        for adapter in adapters[:KEPT]:
            checked(push(client, path, adapter), 201)
        streams = Streams(server, key, [f"run@v{number}" for number in range(1, KEPT + 1)], max_tokens=TOKENS)
        streams.wait_until_all_run()
        ninth = checked(push(client, path, adapters[KEPT]), 201)
        assert (ninth["version"], ninth["checked"]) == (f"v{KEPT + 1}", "structure")
        assert server.stats()["num_running"] == KEPT
        assert expected[KEPT].startswith(text(client, "run", 8)), "the newest has the traffic at once"
        assert streams.all_run_on, "the push came while all of them ran"
        stories = streams.join()
        assert [story.text for story in stories] == expected[:KEPT]
        asked = {"model": "run@v1", "prompt": "one", "max_tokens": 1}
        server.wait(lambda: client.post("/v1/completions", json=asked).status_code == 404)
        assert "retired" in client.post("/v1/completions", json=asked).text
        assert text(client, "run@v2", 8) == expected[1][:8]


def test_streams_and_pushes_go_on_beside_another_tenants_flood_of_pushes(
    server: LiveServer, adapters: list[Path]
) -> None:
    for tenant in ("calm", "flood"):
        server.create_tenant(tenant)
    keys = {tenant: server.create_key(tenant, scopes=SCOPES) for tenant in ("calm", "flood")}
    pushed, enough = [0] * 6, threading.Event()

    def flood(number: int, path: str) -> None:
        with server.client(keys["flood"]) as client:
            for adapter in itertools.cycle(adapters):
                if enough.is_set():
                    return
                pushed[number] += push(client, path, adapter).status_code in (200, 201)

    with server.client(keys["flood"]) as flooding, server.client(keys["calm"]) as client:
        alone = begin_series(client, "calm", "run", adapters[0], 4)
        checked(push(client, alone, adapters[0]), 201)
        expected = text(client, "run@v1", TOKENS)
        path = begin_series(flooding, "flood", "run", adapters[0], 1)
        checked(push(flooding, path, adapters[0]), 201)
        threads = [threading.Thread(target=flood, args=(number, path)) for number in range(len(pushed))]
        for thread in threads:
            thread.start()
        try:
            server.wait(lambda: sum(pushed) > len(pushed))
            streams = Streams(server, keys["calm"], ["run@v1", "run@v1"], max_tokens=TOKENS)
            for adapter in adapters[1:4]:
                before = sum(pushed)
                version = checked(push(client, alone, adapter), 201)["version"]
                # It waits for one of theirs at a time, in each of its stages, and not for all that are on their way.
                assert sum(pushed) - before < len(pushed)
                assert text(client, f"run@{version}", 8)
            assert [story.text for story in streams.join()] == [expected, expected]
        finally:
            enough.set()
            for thread in threads:
                thread.join()
