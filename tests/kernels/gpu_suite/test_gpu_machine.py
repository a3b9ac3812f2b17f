"""What is measured on a GPU needs nothing that a GPU machine lacks: torch, triton, transformers and peft are there, and
the wheels of `make gpu-wheels`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.kernels.gpu_machine import QUICKLY, gpu_environment, hidden_modules, wheels, write_sitecustomize

ROOT = Path(__file__).parents[3]
LISTED = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imported(folder: Path, *modules: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LISTED, *modules],
        check=False,
        env=gpu_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_programs_for_a_gpu_import_nothing_that_its_machine_lacks(tmp_path):
    write_sitecustomize(tmp_path)
    found = imported(
        tmp_path, "bench.gpu.suite", "bench.gpu.worker", "bench.gpu.catalogue",
        "bench.gpu.engine.__main__", "bench.gpu.engine.product", "bench.gpu.lora_peers.__main__",
        "bench.gpu.ten_minutes.__main__",
    )  # fmt: skip
    assert not found & set(hidden_modules())
    # Each wheel is needed: what a machine may have already is harmless, what nothing imports is not taken along.
    modules = {"google-re2": "re2"}
    assert {modules.get(name, name.replace("-", "_")) for name in wheels()} <= found


def test_hidden_modules_are_not_found(tmp_path):
    assert {"numba", "fastapi", "sqlalchemy", "gguf"} <= set(hidden_modules())
    assert not {"torch", "peft", "msgspec", "tokenizers", "accelerate"} & set(hidden_modules())
    write_sitecustomize(tmp_path)
    with pytest.raises(AssertionError, match="No module named 'numba'"):
        imported(tmp_path, "numba")


def test_wheels_have_a_version_in_constraints():
    pinned = {
        re.sub("[_.]", "-", line.partition("==")[0].lower())
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert set(wheels()) <= pinned


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_kinds_of_cases_without_a_gpu_and_without_an_installation(tmp_path):
    """Run the suite as on a GPU machine, where only the files and the wheels are."""
    from bench.gpu import catalogue

    write_sitecustomize(tmp_path, QUICKLY)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.gpu.suite", "--small", "--out", str(out), "--budget", "800"]
    done = subprocess.run(
        command, check=False, env=gpu_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = {line["case"]: line for line in lines[1:]}
    assert set(found) == {case.key for case in catalogue.small()}
    assert all(line["rows"] for line in found.values())
