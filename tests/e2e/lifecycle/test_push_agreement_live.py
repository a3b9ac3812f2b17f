"""A series that holds each push to its trainer, on a live server: wrong weights never serve, whenever it is killed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from support.adapters.peft_zoo import PeftReference
from support.servers.live_server import TINY_SIZES, LiveServer, checked, write_tiny_adapter

pytestmark = pytest.mark.slow

SERIES = "tenants/loop/adapters/policy/series"
VERSIONS = "tenants/loop/adapters/policy/versions"
WITHIN = 1e-4
"""Float32 on both sides differs by less than 4e-6, and another version of these by 0.01 or more."""
KILLS = 4


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(
        tiny_model, tmp_path_factory.mktemp("held") / "data", dtype="float32", **TINY_SIZES
    ) as server:
        server.create_tenant("loop")
        yield server


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Any]]:
    """Adapters, and what PEFT computes with each."""
    work = tmp_path_factory.mktemp("trained")
    folders = [write_tiny_adapter(work / str(seed), seed=seed) for seed in range(3)]
    peft = PeftReference(tiny_model, {folder.name: folder for folder in folders}, torch.float32)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()
    numbers = []
    for folder in folders:
        rows = [peft.logits(folder.name, ids).log_softmax(-1)[:-1] for ids in tokens]
        logprobs = [
            row.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            for row, ids in zip(rows, tokens, strict=True)
        ]
        numbers.append({"tokens": tokens, "logprobs": logprobs})
    return folders, numbers


def push(client: httpx.Client, tensors: bytes, numbers: Any) -> httpx.Response:
    form = {"adapter_model.safetensors": tensors, "agreement": (None, json.dumps(numbers).encode())}
    return client.post(f"{SERIES}/versions", files=form)


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


def serving(server: LiveServer, key: str, model: str = "policy") -> str:
    with server.client(key) as client:
        answer = client.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1})
        return answer.headers.get("x-loraplex-adapter", str(answer.status_code))


def states(server: LiveServer) -> dict[str, str]:
    return {
        row["version"]: row["state"] for row in checked(server.admin.get(f"{VERSIONS}?limit=500"))["data"]
    }


def test_wrong_weights_never_serve(
    server: LiveServer, trained: tuple[list[Path], list[Any]], tmp_path: Path
) -> None:
    folders, numbers = trained
    key = server.create_key("loop", scopes=["inference"])
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    rules = {"keep_last": 4, "check_every": 1000, "config": config, "agree_within": WITHIN}
    checked(server.admin.put(SERIES, json=rules))
    for number in (0, 1):
        made = checked(push(server.admin, weights(folders[number]), numbers[number]), 201)
        assert made["report"]["agreement"]["max"] < WITHIN / 10
        assert serving(server, key) == f"policy@v{number + 1}"
    # The weights of one step with the log probabilities of another.
    refused = push(server.admin, weights(folders[2]), numbers[1])
    assert (refused.status_code, refused.json()["code"]) == (422, "agreement_exceeded")
    assert refused.json()["report"]["agreement"]["mean"] > 10 * WITHIN
    stale = push(server.admin, weights(folders[0]), numbers[2])
    assert (stale.status_code, stale.json()["code"]) == (422, "agreement_exceeded")
    assert (serving(server, key), serving(server, key, "policy@v3")) == ("policy@v2", "404")
    told = httpx.get(f"{server.admin_url}/metrics").text
    assert 'loraplex_agreement_checks_total{outcome="exceeded"} 2.0' in told
    assert 'loraplex_agreement_checks_total{outcome="agreed"} 2.0' in told

    moments = random.Random(58)
    for kill in range(KILLS):
        first = 100 * (kill + 1)
        stream = threading.Thread(
            target=push_wrong, args=(server, tmp_path, range(first, first + 100), numbers[1])
        )
        num_before = len(states(server))
        stream.start()
        server.wait(lambda num_before=num_before: len(states(server)) > num_before)
        time.sleep(moments.uniform(0, 0.1))
        server.kill()
        stream.join(60)
        assert not stream.is_alive()
        server.start()
        assert serving(server, key) == "policy@v2"
        server.wait(lambda: "validating" not in states(server).values())
    found = states(server)
    assert [version for version, state in found.items() if state == "ready"] == ["v1", "v2"]
    assert len(found) >= 3 + KILLS
    assert set(found.values()) == {"ready", "rejected"}
    assert serving(server, key) == "policy@v2"


def push_wrong(server: LiveServer, folder: Path, seeds: range, numbers: Any) -> None:
    """Push weights with the numbers of others, until the server is gone."""
    for seed in seeds:
        tensors = weights(write_tiny_adapter(folder / "wrong", seed=seed))
        try:
            answer = push(server.admin, tensors, numbers)
        except httpx.TransportError:
            return
        assert answer.status_code == 422, answer.text
