"""A server that starts again has its adapters at hand before anybody asks for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.servers.live_server import TINY_TORCH, LiveServer, checked, wait_gone, write_tiny_adapter

pytestmark = pytest.mark.slow


DEVICE, HOST, DISK = ["device", "host", "disk"], ["host", "disk"], ["disk"]
NAMES = "abcdef"


def ask(server: LiveServer, key: str, name: str, times: int) -> None:
    with server.client(key) as client:
        for _ in range(times):
            checked(client.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1}))


def tiers(server: LiveServer) -> dict[str, list[str]]:
    return {name.partition("@")[0]: where for name, where in server.residency().items()}


def is_warmed(server: LiveServer) -> Callable[[], bool]:
    return lambda: server.engine()["healthy"] and not server.stats()["num_warming"]


def test_the_working_set_comes_back_by_demand(tiny_model: Path, tmp_path: Path) -> None:
    """After a drain, after a kill -9 of the engine and of the server: pins before readiness, then what was asked for
    most. A pinned version whose bytes are lost keeps no server from starting."""
    sizes = TINY_TORCH | {"adapter_memory": "1MiB"}
    with LiveServer(tiny_model, tmp_path / "data", dtype="float32", **sizes) as server:
        server.create_tenant("acme")
        key = server.create_key("acme")
        digests = {}
        for seed, name in enumerate(NAMES):
            info = server.upload("acme", name, write_tiny_adapter(tmp_path / name, seed=seed))
            digests[name] = info["digest"]
        fit = server.engine()["info"]["arena_pages"]
        assert fit == 4, "an adapter takes a page, a tenant may pin one of four"
        checked(server.admin.put("tenants/acme/adapters/f/versions/v1/pin"))
        demand = {"c": 5, "e": 4, "a": 3, "b": 2, "d": 1}
        for name in reversed(demand):
            ask(server, key, name, demand[name])
        expected = [*"f", *list(demand)[: fit - 1]]
        assert server.stop() == 0
        recorded = json.loads((tmp_path / "data" / "adapter-demand.json").read_text())
        assert [digest for digest, _, _ in recorded["uses"]] == [digests[name] for name in demand]

        server.start(wait=False)
        server.wait(lambda: bool(server.logged("warming")))
        server.kill()
        server.start(wait=False)
        server.wait(lambda: server.get("/readyz") == 200, 240)
        assert tiers(server)["f"] == DEVICE, "a pin is there before the server is ready"
        server.wait(is_warmed(server))
        assert sorted(name for name, where in tiers(server).items() if where == DEVICE) == sorted(expected)
        assert all(where != DISK for where in tiers(server).values()), "the others are in host memory"

        ask(server, key, "d", 20)
        expected[-1] = "d"
        wait_gone(server.kill_engine())
        server.wait(lambda: server.engine()["restarts"] == 1)
        server.wait(lambda: server.get("/readyz") == 200)
        assert tiers(server)["f"] == DEVICE
        server.wait(is_warmed(server))
        held = sorted(name for name, where in tiers(server).items() if where == DEVICE)
        assert "d" in held
        assert len(held) == fit

        server.kill()
        for path in (tmp_path / "data" / "artifacts" / "sha256").glob(f"*/{digests['f']}/*.safetensors"):
            path.chmod(0o600)
            path.write_bytes(b"damaged")
        for path in (tmp_path / "data" / "images").glob("*/*"):
            path.unlink()
        began = time.monotonic()
        server.start()
        print(f"ready after {time.monotonic() - began:.1f} s with a damaged pin")
        assert server.logged("pin_not_loaded")[-1]["adapter"] == "f@v1"
        server.wait(is_warmed(server))
        assert tiers(server)["c"] == DEVICE
