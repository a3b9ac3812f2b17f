"""A server whose adapters are in a bucket that goes away and comes back, and whose copies are damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from support.faults.tcp_proxy import TcpProxy
from support.servers.live_server import TINY_TORCH, LiveServer, checked, write_tiny_adapter
from support.servers.s3_server import BUCKET, s3_server

pytestmark = pytest.mark.slow


def ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post(
        "/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 4, "temperature": 0}
    )


def text(answer: httpx.Response) -> str:
    return str(checked(answer)["choices"][0]["text"])


def test_a_bucket_that_is_away_harms_cold_adapters_alone(tiny_model: Path, tmp_path: Path) -> None:
    cache, images = (tmp_path / "data" / name for name in ("artifact-cache", "images"))
    with s3_server() as s3, TcpProxy(s3.port) as proxy:
        settings = {"artifact_url": f"s3://{BUCKET}/live", "environment": s3.variables(proxy.port)}
        with LiveServer(tiny_model, tmp_path / "data", dtype="float32", **settings, **TINY_TORCH) as server:
            server.create_tenant("acme")
            key = server.create_key("acme")
            made = [
                server.upload("acme", "a", write_tiny_adapter(tmp_path / f"a{seed}", seed=seed))
                for seed in (1, 2)
            ]
            with server.client(key) as client:
                hot, cold = text(ask(client, "a")), text(ask(client, "a@v2"))
            assert server.stop() == 0
            # v1's copy is damaged: it is fetched again. Of v2, which is not released, no copy is left.
            folders = [cache / "sha256" / one["digest"][:2] / one["digest"] for one in made]
            path = folders[0] / "adapter_model.safetensors"
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            shutil.rmtree(folders[1])
            shutil.rmtree(images, ignore_errors=True)
            # What was asked for is not recorded, or v2 would be warmed before the bucket is away.
            (tmp_path / "data" / "adapter-demand.json").unlink()
            server.start()
            with server.client(key) as client:
                assert text(ask(client, "a")) == hot
                assert path.read_bytes() == data
                proxy.hang()
                refused = ask(client, "a@v2")
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_unavailable")
                assert int(refused.headers["retry-after"]) >= 1
                assert text(ask(client, "a")) == hot
                proxy.carry()
                server.wait(lambda: ask(client, "a@v2").status_code == 200)
                assert text(ask(client, "a@v2")) == cold
