"""Tinker's own SDK, unchanged, against a whole server: its numbers are those of /v1/completions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.adapters.drafts import make_adapter
from support.clients.outside_clients import INSTALLED, SCRIPTS, skip_unless_installed
from support.servers.live_server import TINY, TINY_SIZES, LiveServer, checked, write_tiny_model

pytestmark = pytest.mark.slow

SERVED = "tiny"
PROMPT = [*b"once upon a time"]


def sampled(given: dict[str, Any], home: Path) -> dict[str, Any]:
    done = subprocess.run(
        [
            str(INSTALLED / "tinker" / "bin" / "python"),
            str(SCRIPTS / "tinker_sampling.py"),
            json.dumps(given),
        ],
        env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_sdk_samples_what_completions_give(tmp_path: Path) -> None:
    skip_unless_installed("tinker")
    model = write_tiny_model(tmp_path / SERVED)
    sizes = TINY_SIZES | {"dtype": "float32", "served_model_name": SERVED}
    with LiveServer(model, tmp_path / "data", **sizes) as server:
        for tenant in ("acme", "rival"):
            server.create_tenant(tenant)
        key = server.create_key("acme", scopes=["inference"])
        for seed in (1, 2):
            make_adapter(tmp_path / f"a{seed}", TINY, seed=seed, scale=1.0)
            server.upload("acme", "policy", tmp_path / f"a{seed}")
        server.upload("rival", "secret", tmp_path / "a1")
        names = {"first": "policy/sampler_weights/v1", "second": "policy/sampler_weights/v2"}
        names |= {"foreign": "secret/sampler_weights/v1", "unknown": "policy/sampler_weights/v9"}
        paths = {name: f"tinker://{path}" for name, path in names.items()}
        given = {"url": server.data_url, "key": key, "base": SERVED, "paths": paths, "prompt": PROMPT}
        found = sampled(given, tmp_path)
        with server.client(key) as client:

            def expected(model: str) -> tuple[str, list[float]]:
                asked = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
                asked |= {"echo": True, "logprobs": 0, "return_token_ids": True}
                choice = checked(client.post("/v1/completions", json=asked))["choices"][0]
                return choice["token_ids"], choice["logprobs"]["token_logprobs"][1:]

            wanted = {
                name: expected(model)
                for name, model in {"base": SERVED, "first": "policy@v1", "second": "policy@v2"}.items()
            }
    assert found["models"] == [SERVED]
    for name, (token_ids, logprobs) in wanted.items():
        tokens, own, prompt, _ = found[name]
        assert tokens == token_ids[-len(tokens) :], name
        assert prompt[0] is None
        assert [*prompt[1:], *own] == pytest.approx(logprobs, abs=1e-6), name
    assert found["first"][2] != found["second"][2] != found["base"][2]
    assert found["scored"] == found["base"][2]
    assert found["seeded"][0] == found["seeded"][1]
    assert found["many"] == [found["base"][0]] * 32
    for name in ("foreign", "unknown"):
        assert found[name][0] == "NotFoundError"
    assert "verb of Tinker" in str(found["training"])
