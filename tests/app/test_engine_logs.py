"""Log lines about one engine of several, of the server's process and of the engine's."""

from __future__ import annotations

import json
import os
import signal

import pytest
from structlog.testing import capture_logs

from loraplex.app.engines.logs import engine_rules, log_engine
from loraplex.engine.config import EngineConfig
from loraplex.serving.engines.local import LocalEngine
from support.engine.fake_processes import FAKE_ENGINE, until
from support.http.quiet import all_levels


@pytest.mark.parametrize("name", ["replica-2", None])
async def test_each_line_names_the_engine_of_several(
    name: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    with all_levels(), capture_logs() as of_server:
        rules = engine_rules(name, keep_spare=False, command=FAKE_ENGINE)
        client = LocalEngine(EngineConfig("ok", "/nowhere"), rules)
        await client.start()
        rules.on_progress("loading", 1.0)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.num_restarts == 1 and client.healthy)
        await client.close()
    of_engine = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    events = {"engine_started", "engine_starting", "engine_lost", "engine_restart"}
    assert events <= {line["event"] for line in of_server}
    assert "engine_ready" in {line["event"] for line in of_engine}
    assert {line.get("replica") for line in (*of_server, *of_engine)} == {name}


@pytest.mark.parametrize(
    ("fields", "level"),
    [
        ({"failed_requests": 0, "replica": "replica-1"}, "warning"),
        ({"failed_requests": 2, "replica": "replica-1"}, "error"),
        ({"failed_requests": 0}, "error"),  # the only one
    ],
)
def test_a_failover_is_no_error(fields: dict[str, object], level: str) -> None:
    with all_levels(), capture_logs() as lines:
        log_engine("engine_lost", **fields)
    assert [line["log_level"] for line in lines] == [level]
