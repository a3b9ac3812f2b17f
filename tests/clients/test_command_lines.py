"""Codex and Claude Code as command lines against a scripted engine: each finishes a turn in which it runs a command."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clients.outside_clients import INSTALLED, skip_unless_installed
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.tool_plane import tool_plane
from support.models.byte_tokenizer import byte_decode

pytestmark = pytest.mark.slow

ASKED = "Say hi with echo."
TIMEOUT_S = 120
CODEX = """
model = "{model}"
model_provider = "loraplex"
[model_providers.loraplex]
name = "Loraplex"
base_url = "{url}/v1"
env_key = "LORAPLEX_API_KEY"
wire_api = "responses"
"""


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    with tool_plane(tmp_path / "model", max_model_len=1 << 18, default_max_tokens=4096) as running:
        yield running
        running.settle_all()


def run(client: str, program: str, arguments: list[str], home: Path, **environment: str) -> str:
    skip_unless_installed(client)
    work = home / "work"
    work.mkdir(parents=True)
    done = subprocess.run(
        [str(INSTALLED / client / "node_modules" / ".bin" / program), *arguments],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def call(name: str, arguments: str) -> str:
    return f'<think>Hm.</think>I say it.<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_codex(plane: DataPlane, tmp_path: Path) -> None:
    plane.engine.script(
        Reply(text=call("exec_command", '{"cmd": "echo h$((1))i"}'), cuts=(5, 1, 9)), Reply(text="All done.")
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(CODEX.format(model=BASE, url=plane.url), "utf-8")
    arguments = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASKED]
    said = run("codex", "codex", arguments, home, CODEX_HOME=str(home), LORAPLEX_API_KEY="lpx_acme")
    assert "All done." in said
    shown = byte_decode(plane.engine.requests[-1].prompt_ids)
    assert len(plane.engine.requests) == 2
    assert "h1i" in shown  # what the command said
    assert "Hm.</think>I say it." in shown


def test_claude_code(plane: DataPlane, tmp_path: Path) -> None:
    use = call("Bash", '{"command": "echo h$((1))i", "description": "Say hi"}')
    plane.engine.script(Reply(text=use, cuts=(5, 1, 9)), Reply(text="All done."))
    said = run(
        "claude_code",
        "claude",
        ["-p", ASKED, "--model", BASE, "--allowedTools", "Bash"],
        tmp_path / "home",
        ANTHROPIC_BASE_URL=plane.url,
        ANTHROPIC_API_KEY="lpx_acme",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )
    assert said.strip().endswith("All done.")
    shown = byte_decode(plane.engine.requests[-1].prompt_ids)
    assert len(plane.engine.requests) == 2
    assert "h1i" in shown
    assert "Hm.</think>I say it." in shown
