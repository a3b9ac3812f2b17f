"""Failed tests are run once more, and what the run then says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CONFTEST = """
from support import rerun_failed

def pytest_addoption(parser):
    rerun_failed.add_option(parser)

def pytest_configure(config):
    rerun_failed.register(config)
"""
FAILS_ONCE = """
import pathlib, pytest

@pytest.mark.xdist_group("some/file.py")
@pytest.mark.parametrize("value", ["a@b"])
def test_once(value):
    seen = pathlib.Path(__file__).with_suffix(".seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there, "the first time"
"""
SETUP_FAILS_ONCE = """
import pathlib, pytest

@pytest.fixture
def server():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    was_there = seen.exists()
    seen.touch()
    assert was_there, "not up"

def test_needs(server): ...
"""
FAILS = "def test_always():\n    assert False, 'a bug'\n"
PASSES = "def test_passes(): ...\n"
DIES = "import os\ndef test_dies():\n    os._exit(3)\n"


def run(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    for name, text in ({"conftest.py": CONFTEST, "pytest.ini": "[pytest]\n"} | files).items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", *options]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_passes_alone_is_told_and_fails_nothing(tmp_path: Path, processes: str) -> None:
    files = {"test_a.py": FAILS_ONCE, "test_b.py": PASSES, "test_c.py": SETUP_FAILS_ONCE}
    status, said = run(tmp_path, files, "--rerun-failed", "-n", processes, "--dist", "loadgroup")
    assert status == 0, said
    assert "the first time" in said  # the traceback is shown all the same
    told = [line for line in said.splitlines() if line.startswith("flaky: ")]
    assert sorted(told) == ["flaky: test_a.py::test_once[a@b]", "flaky: test_c.py::test_needs"]
    assert said.rstrip().splitlines()[-1] in told


def test_what_fails_again_fails_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, {"test_a.py": FAILS_ONCE, "test_b.py": FAILS}, "--rerun-failed")
    assert status == 1
    assert "a bug" in said
    assert "flaky: test_a.py::test_once[a@b]" in said
    assert "flaky: test_b.py" not in said


def test_many_failures_are_no_chance(tmp_path: Path) -> None:
    files = {f"test_{number}.py": FAILS_ONCE for number in range(6)}
    status, said = run(tmp_path, files, "--rerun-failed")
    assert status == 1
    assert "once more" not in said


def test_a_process_that_dies_is_a_failure(tmp_path: Path) -> None:
    status, said = run(tmp_path, {"test_a.py": DIES, "test_b.py": PASSES}, "--rerun-failed", "-n", "2")
    assert status == 1
    assert "once more" not in said


def test_without_the_option_nothing_runs_twice(tmp_path: Path) -> None:
    status, said = run(tmp_path, {"test_a.py": FAILS_ONCE})
    assert status == 1
    assert "once more" not in said
