"""The product without a checkout: a wheel, installed where nothing else is, runs the quickstart."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.gguf import REAL_WEIGHTS
from support.live_server import EXAMPLES, REPOSITORY, clean_environment, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = clean_environment({"PYTHONNOUSERSITE": "1", **environment})
    given.pop("PYTHONPATH", None)
    return subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, check=False)


def installed(*command: str | Path) -> str:
    """What a pip command says. Where there is no package index the test is skipped, but not in CI."""
    done = run(*command, cwd=REPOSITORY)
    if done.returncode != 0 and "CI" not in os.environ:
        pytest.skip(f"pip reaches no package index: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_wheel_runs_the_quickstart_from_an_empty_directory(tmp_path: Path) -> None:
    here = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    installed(*here, "wheel", "--no-deps", "--wheel-dir", tmp_path / "wheel", REPOSITORY)
    (wheel,) = (tmp_path / "wheel").iterdir()
    installed(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    installed(python, "tools/install_torch.py", "constraints.txt")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-compile"]
    installed(*pip, "--constraint", "constraints.txt", wheel)
    present = installed(python, "-m", "pip", "list", "--format", "freeze").lower()
    assert "loraplex==" in present
    assert "accelerate" not in present, "the tests' own tools are to be absent"

    empty = tmp_path / "empty"
    empty.mkdir()
    ports = free_ports(2)
    done = run(
        python.with_name("loraplex"),
        "quickstart",
        "--exit",
        cwd=empty,
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        LORAPLEX_MODEL_CACHE="",
        LORAPLEX_PORT=str(ports[0]),
        LORAPLEX_ADMIN_PORT=str(ports[1]),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in EXAMPLES:
        assert f"{name}: accepted as v1" in done.stdout
    assert f"http://127.0.0.1:{ports[0]}, admin plane http://127.0.0.1:{ports[1]}" in done.stdout
    assert {path.name for path in empty.iterdir()} == {"data"}
    (weights,) = (tmp_path / "cache" / "loraplex" / "models").glob("*/*/model.safetensors")
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == REAL_WEIGHTS
