"""The Open Responses project's own compliance tests over HTTP (docs/dialects.md says how to install them)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clients.outside_clients import INSTALLED, hermes_call, skip_unless_installed
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.tool_plane import tool_plane

pytestmark = pytest.mark.slow

TEXTS = {
    "basic-response",
    "assistant-phase",
    "response-output-phase-schema",
    "streaming-response",
    "system-prompt",
    "multi-turn",
    "compact-response",
    "compact-missing-model",
}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    with tool_plane(tmp_path) as running:
        yield running
        running.settle_all()


@pytest.mark.parametrize(
    ("said", "tests"),
    [
        ("One, two, three.", TEXTS),
        (hermes_call("get_weather", {"location": "San Francisco"}), {"tool-calling"}),
    ],
)
def test_the_projects_own_tests_pass(plane: DataPlane, said: str, tests: set[str]) -> None:
    skip_unless_installed("open_responses")
    plane.engine.default = Reply(text=said)
    command = [
        "node_modules/.bin/bun",
        "run",
        "bin/compliance-test.ts",
        "--json",
        "--filter",
        ",".join(tests),
    ]
    command += ["--base-url", f"{plane.url}/v1", "--api-key", "lpx_acme", "--model", BASE]
    done = subprocess.run(
        command, cwd=INSTALLED / "open_responses", capture_output=True, text=True, timeout=120, check=False
    )
    told = json.loads(done.stdout)
    assert {result["id"] for result in told["results"] if result["status"] == "passed"} == tests, told
