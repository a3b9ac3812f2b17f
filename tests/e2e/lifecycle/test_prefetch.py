"""A server that starts again has its adapters at hand before anybody asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.servers.live_server import TINY_SIZES, LiveServer, checked, write_tiny_adapter

pytestmark = pytest.mark.slow


def test_released_versions_are_hot_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    with LiveServer(tiny_model, tmp_path / "data", dtype="float32", **TINY_SIZES) as server:
        server.create_tenant("acme")
        key = server.create_key("acme")
        for name in ("one", "two"):
            server.upload("acme", name, write_tiny_adapter(tmp_path / name))
        assert server.stop() == 0
        server.start()
        device = ["device", "host", "disk"]
        server.wait(lambda: list(server.residency().values()) == [device, device])
        with server.client(key) as client:
            answer = client.post("/v1/completions", json={"model": "two", "prompt": "a", "max_tokens": 1})
        checked(answer)
        assert answer.headers["x-loraplex-adapter-state"] == "hot"
