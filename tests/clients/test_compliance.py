"""llm-comply, which holds answers against the published schemas of Open Responses and of Anthropic's API, with requests
of its own. It asks for images and for a store of conversations too, which are refused here."""

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

SAID = "Hello Alice, I count: 1, 2, 3, 4, 5."
BOTH = {
    "basic-response",
    "system-prompt",
    "multi-turn",
    "tool-calling",
    "streaming-response",
    "streaming-usage",
    "error-handling",
}
PASSED = {
    "open-responses": BOTH | {"assistant-phase", "response-output-phase-schema"},
    "anthropic": BOTH,
}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    with tool_plane(tmp_path) as running:
        running.engine.default = Reply(text=SAID)
        # The fourth request of both dialects is the one that requires a call.
        called = Reply(text=hermes_call("get_weather", {"location": "San Francisco"}))
        running.engine.script(*[Reply(text=SAID)] * 3, called)
        yield running
        running.settle_all()


@pytest.mark.parametrize("dialect", list(PASSED))
def test_answers_fit_the_published_schemas(plane: DataPlane, dialect: str) -> None:
    skip_unless_installed("llm_comply")
    command = [str(INSTALLED / "llm_comply" / "bin" / "llm-comply"), "--json", "--format", dialect]
    command += ["-u", f"{plane.url}/v1", "-k", "lpx_acme", "-m", BASE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = json.loads(done.stdout)
    done_well = [result["id"] for result in told["results"] if result["status"] == "passed"]
    passed = {name.removeprefix("anth-") for name in done_well}
    assert passed >= PASSED[dialect], told
