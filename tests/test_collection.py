"""Which tests `tests/conftest.py` skips and how it records them, wherever the checkout lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.soak
def test_soak(): pass
"""


@pytest.mark.parametrize("folder", ["soak", "slow"])
def test_the_name_of_a_checkout_marks_no_test(tmp_path: Path, folder: str) -> None:
    tests = tmp_path / folder / "tests"
    tests.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("conftest.py"), tests)
    (tests.parent / "pytest.ini").write_text("[pytest]\nmarkers = slow\n soak\n")
    (tests / "durations.json").write_text("{}")
    (tests / "test_one.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "--record-durations", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        command, check=False, cwd=tests.parent, env=environment, capture_output=True, text=True
    )
    results = {
        line.split()[0].rpartition("::")[2]: line.split()[1]
        for line in done.stdout.splitlines()
        if "::" in line
    }
    assert results == {"test_plain": "PASSED", "test_slow": "PASSED", "test_soak": "SKIPPED"}, done.stdout
    assert json.loads((tests / "durations.json").read_text())["test_one.py"].keys() == {"fast", "slow"}
