"""`loraplex serve --redis-url`: limits that outlive the server that counted them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.servers.live_server import SERVE, TINY_TORCH, LiveServer, importable_tests
from support.servers.redis_server import redis_server

pytestmark = pytest.mark.slow
SECRET = "not-to-be-seen"
PATIENT_SERVE = Path(__file__).parents[2] / "support" / "servers" / "patient_serve.py"


def test_a_server_counts_in_redis_and_leaves_nothing_of_itself_there(
    tiny_model: Path, tmp_path: Path
) -> None:
    redis = redis_server()
    redis.client.flushall()
    redis.client.execute_command("ACL", "SETUSER", "loraplex", "on", f">{SECRET}", "~{loraplex}*", "+@all")
    url = redis.url.replace("redis://", f"redis://loraplex:{SECRET}@")
    environment = {"LORAPLEX_REDIS_URL": url}
    server = LiveServer(
        tiny_model, tmp_path / "data", environment=environment, served_model_name="base", **TINY_TORCH
    )
    server.environment["PYTHONPATH"] = importable_tests()
    server.command[: len(SERVE)] = [sys.executable, str(PATIENT_SERVE), "serve"]
    try:
        server.start()
        server.create_tenant("acme", limits={"requests_per_minute": 1, "max_concurrency": 1})
        body = {"model": "base", "prompt": "x", "max_tokens": 1}
        with server.client(server.create_key("acme")) as client:
            codes = [client.post("/v1/completions", json=body).status_code for _ in range(2)]
        assert codes == [200, 429]
        assert redis.client.zcard("{loraplex}:seen") == 1
        assert redis.client.hlen("{loraplex}:state") == 3
        assert server.stop() == 0
        # What was counted outlives the server that counted it; of the server itself nothing is left.
        assert redis.client.keys("{loraplex}:rate:*") == [b"{loraplex}:rate:tenant:acme:requests"]
        assert redis.client.keys("{loraplex}:seen") == redis.client.keys("{loraplex}:busy:*") == []
        assert set(redis.client.hgetall("{loraplex}:state")) == {b"born", b"decisions"}
        assert server.logged("limiter_redis_lost") == []
        assert SECRET not in server.log_path.read_text()
    finally:
        server.reap()
        redis.revive()
