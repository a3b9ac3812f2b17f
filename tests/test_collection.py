"""Which tests `tests/conftest.py` skips, shares out and records, wherever the checkout lies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

KEPT_S = 3
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.soak
def test_soak(): pass
"""


def test_a_file_is_run_by_one_process_and_the_name_of_a_checkout_marks_none(tmp_path: Path) -> None:
    tests = tmp_path / "soak" / "slow" / "tests"
    tests.mkdir(parents=True)
    source = Path(__file__).with_name("conftest.py").read_text()
    assert f"KEPT_S = {KEPT_S}\n" in source
    (tests / "conftest.py").write_text(source.replace(f"KEPT_S = {KEPT_S}\n", "KEPT_S = 0\n"))
    (tests.parent / "pytest.ini").write_text("[pytest]\nmarkers = slow\n soak\n")
    (tests / "durations.json").write_text("{}")
    for name in ("one", "two"):
        (tests / f"test_{name}.py").write_text(TESTS)
    options = "-n 2 --dist loadgroup --no-loadscope-reorder --record-durations -p no:cacheprovider -p no:schemathesis"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *options.split()],
        check=False,
        cwd=tests.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    # Such as "[gw0] [ 16%] PASSED tests/test_one.py::test_plain@test_one.py".
    lines = re.findall(r"^\[(gw\d)\] .*\] (\w+) tests/([\w.:]+)", done.stdout, re.MULTILINE)
    ran = {test: (result, process) for process, result, test in lines}
    assert ran, done.stdout + done.stderr
    one, two = ran["test_one.py::test_plain"][1], ran["test_two.py::test_plain"][1]
    results = {"test_plain": "PASSED", "test_slow": "PASSED", "test_soak": "SKIPPED"}
    assert ran == {
        f"test_{file}.py::{test}": (result, process)
        for file, process in (("one", one), ("two", two))
        for test, result in results.items()
    }, done.stdout
    assert one != two
    recorded = json.loads((tests / "durations.json").read_text())
    assert {name: found.keys() for name, found in recorded.items()} == {
        f"test_{name}.py": {"fast", "slow"} for name in ("one", "two")
    }
