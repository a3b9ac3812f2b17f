"""Each line that `loraplex serve` and its engine process write in a life with failures, against the schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.http.log_schema import check_lines
from support.http.otlp_collector import port_without_a_listener
from support.servers.live_server import (
    TINY_TORCH,
    LiveServer,
    checked,
    write_tiny_adapter,
    write_tiny_model,
)

pytestmark = pytest.mark.slow

CHAT: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def test_every_line_of_a_servers_life_is_by_the_schema(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    endpoint = f"http://127.0.0.1:{port_without_a_listener()}"
    server = LiveServer(model, tmp_path / "data", otlp_endpoint=endpoint, log_level="debug", **TINY_TORCH)
    with server:
        server.create_tenant("acme")
        key = server.create_key("acme")
        server.upload("acme", "bot", write_tiny_adapter(tmp_path / "v1"))
        url = "/v1/chat/completions"
        with server.client(key) as client:
            checked(client.post(url, json={**CHAT, "model": "bot"}))
            assert client.post(url, json={**CHAT, "model": "nobody"}).status_code == 404
            assert client.post(url, content=b"\xff{").status_code == 400
            assert client.get("/nowhere").status_code == 404
            long = {**CHAT, "model": "bot", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
            with client.stream("POST", url, json=long) as stream:
                next(stream.iter_lines())
            with client.stream("POST", url, json=long) as stream:
                chunks = stream.iter_lines()
                next(chunks)
                server.kill_engine()
                assert "engine_restarting" in "".join(chunks)
            server.wait(lambda: client.post(url, json={**CHAT, "model": "bot"}).status_code == 200, 240)
        assert server.client("lpx_wrong").post(url, json=CHAT).status_code == 401
        assert server.admin.get("tenants/nobody").status_code == 404
        checked(server.admin.delete("tenants/acme/adapters/bot"), 204)
        server.wait(lambda: bool(server.logged("trace_export_failed")))
        assert server.stop() == 0
    lines = server.log_path.read_text().splitlines()
    plain = [line for line in lines if not line.startswith("{")]
    assert [line.split(" (")[0] for line in plain] == ["admin token"]
    entries = check_lines(line for line in lines if line.startswith("{"))
    seen = {entry["event"] for entry in entries}
    assert seen >= {
        *("engine_starting", "engine_started", "engine_ready", "serving", "request"),
        *("admin_request", "engine_lost", "engine_restart", "draining", "drained", "trace_export_failed"),
    }
    assert {entry["process"] for entry in entries} == {"server", "engine"}
    assert all(entry["level"] == "error" for entry in entries if entry["event"] == "engine_lost")
    assert all(entry["trace_id"] for entry in entries if entry["event"] == "request" and entry["model"])
    assert key not in server.log_path.read_text()
