"""A version shadowed by another one with the same weights, on a real engine under load."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.control.catalog.shadow_store import cut
from support.servers.live_server import LiveServer, Shop, checked

pytestmark = pytest.mark.slow
NUM_REQUESTS = 48
RELEASE = "tenants/mirror/adapters/twin/release"


def outcomes(server: LiveServer) -> dict[str, int]:
    """Sampled requests since the start, by outcome."""
    prefix = 'loraplex_shadow_requests_total{outcome="'
    lines = httpx.get(f"{server.admin_url}/metrics").text.splitlines()
    found = (line.removeprefix(prefix).split('"} ') for line in lines if line.startswith(prefix))
    return {outcome: int(float(count)) for outcome, count in found}


def test_a_version_with_the_same_weights_gives_the_same_tokens(
    tiny: Shop, tiny_adapter: Path, tmp_path: Path
) -> None:
    """Greedy answers and sampled ones, with and without a stop string, beside each other in one batch."""
    server = tiny.server
    server.create_tenant("mirror")
    twin = shutil.copytree(tiny_adapter, tmp_path / "twin")
    config = json.loads((twin / "adapter_config.json").read_text())
    # Of effect in training only: the same weights and another version.
    (twin / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.25}))
    assert server.upload("mirror", "twin", tiny_adapter)["version"] == "v1"
    assert server.upload("mirror", "twin", twin)["version"] == "v2"
    shadow = {"version": "v2", "sample": 1, "keep_texts": True}
    checked(server.admin.put(RELEASE, json={"targets": [{"version": "v1", "weight": 1}], "shadow": shadow}))
    key = server.create_key("mirror")

    def ask(number: int) -> str:
        body: dict[str, Any] = {
            "model": "twin",
            "prompt": f"{number} and {number * number}",
            "max_tokens": 24,
            "temperature": (0.0, 1.1)[number % 2],
            "stop": (None, "e")[number % 3 == 0],
        }
        with server.client(key) as client:
            return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(NUM_REQUESTS)))
    server.wait(lambda: sum(outcomes(server).values()) == NUM_REQUESTS)
    assert outcomes(server) == {"exact": NUM_REQUESTS} | dict.fromkeys(
        ("different", "dropped", "failed", "skipped"), 0
    )

    def kept() -> list[dict[str, Any]]:
        found = checked(server.admin.get(f"{RELEASE}/shadow/texts", params={"limit": 200}))
        return list(found["data"])

    server.wait(lambda: len(kept()) == NUM_REQUESTS)
    assert all(one["answer"] == one["shadow_answer"] for one in kept())
    assert sorted(one["answer"] for one in kept()) == sorted(map(cut, answers))
    assert server.idle()
