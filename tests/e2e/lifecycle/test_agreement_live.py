"""The agreement report of a running server beside PEFT's own log probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.adapters.peft_zoo import PeftReference
from support.servers.live_server import Shop, checked, write_tiny_adapter

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""The most that a log probability in float32 may be off; measured differences are below 4e-6."""


def test_the_right_version_agrees_and_a_wrong_one_does_not(
    tiny: Shop, tiny_model: Path, tmp_path: Path
) -> None:
    folders = {f"v{seed}": write_tiny_adapter(tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)}
    tiny.server.create_tenant("loop")
    for version, folder in folders.items():
        assert tiny.server.upload("loop", "policy", folder)["version"] == version
    key = tiny.server.create_key("loop", scopes=["adapters:train"])
    random = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 256, (length,), generator=random).tolist() for length in (40, 7, 130)]
    peft = PeftReference(tiny_model, {"v1": folders["v1"]}, torch.float32)
    logprobs: list[Any] = []
    for ids in tokens:
        rows = peft.logits("v1", ids).log_softmax(-1)[:-1]
        logprobs.append([None, *rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()])
    found = {}
    with tiny.server.client(key) as client:
        for version in folders:
            path = f"/admin/v1/tenants/loop/adapters/policy/versions/{version}/agreement"
            found[version] = checked(client.post(path, json={"tokens": tokens, "logprobs": logprobs}))
    told = ("mean", "max", "bias", "kl", "tokens")
    shown = {version: {name: one[name] for name in told} for version, one in found.items()}
    print(json.dumps(shown))
    assert found["v1"]["tokens"] == found["v2"]["tokens"] == sum(map(len, tokens)) - len(tokens)
    assert found["v1"]["max"] <= TOLERANCE
    assert found["v1"]["kl"] <= TOLERANCE**2
    assert found["v2"]["mean"] > 1000 * TOLERANCE
