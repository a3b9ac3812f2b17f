"""The product without a checkout: a wheel, installed where nothing else is, runs the quickstart."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex.kernels.numba_runtime.probe import probe
from support.servers.live_server import EXAMPLES, REPOSITORY, clean_environment, free_ports

pytestmark = pytest.mark.slow


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
    """Its dependencies come from this environment. `.ci/run` shows that the declared packages are enough: its
    first command finds nothing else installed, no model and no compiled kernels."""
    here = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    installed(
        *here, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheel", REPOSITORY
    )
    (wheel,) = (tmp_path / "wheel").iterdir()
    installed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    installed(*here, "--python", python, "install", "--no-deps", "--no-compile", wheel)
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # What a .pth file names is searched last, and its own .pth files, such as this checkout's, are not read.
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    (own / "lent.pth").write_text(str(Path(torch.origin).parents[1]))
    where = run(python, "-c", "import loraplex.app; print(loraplex.app.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(own)), where.stderr

    # One compiled kernel, in place of all: in a new place all of them would be compiled again.
    compiled = run(python, "-c", f"from {probe.__module__} import probe; probe()", cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr

    empty = tmp_path / "empty"
    empty.mkdir()
    ports = free_ports(2)
    done = run(
        python.with_name("loraplex"),
        "quickstart",
        "--exit",
        "--max-tokens",
        "4",
        cwd=empty,
        LORAPLEX_PORT=str(ports[0]),
        LORAPLEX_ADMIN_PORT=str(ports[1]),
        LORAPLEX_THREADS="1",
        LORAPLEX_ENGINE_SPARE="false",
        LORAPLEX_KERNELS="torch",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in EXAMPLES:
        assert f"{name}: accepted as v1" in done.stdout
    assert f"http://127.0.0.1:{ports[0]}, admin plane http://127.0.0.1:{ports[1]}" in done.stdout
    assert {path.name for path in empty.iterdir()} == {"data"}
