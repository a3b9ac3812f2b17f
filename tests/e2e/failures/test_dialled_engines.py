"""`loraplex engine` beside `loraplex serve --replicas 0`, both as processes of their own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.servers.certificates import make_certificates
from support.servers.live_server import (
    TINY_TORCH,
    LiveServer,
    checked,
    clean_environment,
    free_ports,
    wait_gone,
)
from support.waiting import eventually

pytestmark = pytest.mark.slow
ENGINE = (sys.executable, "-m", "loraplex.app.cli", "engine")


@dataclass
class LiveEngine:
    """A running `loraplex engine`."""

    process: subprocess.Popen[bytes]
    log_path: Path

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


@contextlib.contextmanager
def engine(folder: Path, port: int, model: Path, **options: Any) -> Iterator[LiveEngine]:
    """Run one with the data directory of the server in `folder`."""
    given = {
        "join": f"127.0.0.1:{port}",
        "model": model,
        "data_dir": folder / "data",
        "threads": 1,
        "dtype": "float32",
        **TINY_TORCH,
        **options,
    }
    command = [*ENGINE, "--no-engine-spare"]
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    log_path = folder / "engine.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=clean_environment())
    try:
        yield LiveEngine(process, log_path)
    finally:
        process.kill()
        process.wait()


def answer(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": "sea", "max_tokens": 16, "seed": 1, "ignore_eos": True}
    return str(checked(client.post("/v1/completions", json=body))["choices"][0]["text"])


def test_an_engine_serves_keeps_its_adapters_over_a_server_and_drains(
    tmp_path: Path, tiny_model: Path, tiny_adapter: Path
) -> None:
    """By TLS; the other test dials without it."""
    (port,) = free_ports(1)
    made = make_certificates(tmp_path)
    tls = {"engine_tls": made.cert.parent}
    server = LiveServer(
        tiny_model, tmp_path / "data", replicas=0, engine_port=port, dtype="float32", **TINY_TORCH, **tls
    )
    try:
        server.start(wait=False)
        eventually((tmp_path / "data" / "engine-token").exists)
        assert server.get("/readyz") != 200
        with engine(tmp_path, port, tiny_model, replica="far", engine_tls=made.ca.parent) as far:
            server.wait_ready()
            (joined,) = server.logged("engine_joined")
            assert joined["replica"] == "far"
            server.create_tenant("acme")
            server.upload("acme", "a", tiny_adapter)
            client = server.client(server.create_key("acme"))
            answers = [answer(client, "a"), answer(client, server.engine()["info"]["model_name"])]
            assert answers[0] != answers[1]
            server.kill()
            server.start()
            again = [answer(client, "a"), answer(client, server.engine()["info"]["model_name"])]
            assert again == answers
            assert [line["pid"] for line in far.logged("engine_started")] == [joined["pid"]]
            far.process.send_signal(signal.SIGTERM)
            assert far.process.wait(60) == 0
            wait_gone(joined["pid"])
            assert server.logged("engine_left")[-1]["reason"] == "it has drained"
            assert client.post("/v1/completions", json={"model": "a", "prompt": "sea"}).status_code == 503
        assert server.stop() == 0
    finally:
        server.reap()


def test_an_engine_of_another_store_is_refused_by_name(tmp_path: Path, tiny_model: Path) -> None:
    (port,) = free_ports(1)
    server = LiveServer(tiny_model, tmp_path / "data", engine_port=port, dtype="float32", **TINY_TORCH)
    with (
        server,
        engine(
            tmp_path,
            port,
            tiny_model,
            data_dir=tmp_path / "other",
            engine_token_file=tmp_path / "data" / "engine-token",
        ) as stranger,
    ):
        eventually(lambda: bool(stranger.logged("server_not_joined")), 120)
        assert "cannot read the server's artifact store" in stranger.logged("server_not_joined")[0]["reason"]
        assert stranger.process.poll() is None
