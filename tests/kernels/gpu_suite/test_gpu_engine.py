"""The product's run on a GPU goes through all of its parts interpreted, and says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from bench.gpu.engine import __main__ as program
from bench.gpu.engine import product
from loraplex.kernels.lora.triton_lora import LoraLauncher
from support.kernels.gpu_machine import QUICKLY, gpu_environment, write_sitecustomize

pytestmark = pytest.mark.usefixtures("quick_interpreter")
PARTS = ["write", "start", "answer", "churn", "starve", "compare", "preempt"]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """What the program sets for itself is gone after it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.soak
def test_all_parts_are_right_without_a_gpu(tmp_path):
    """With what a GPU machine has, and nothing else. In every run its parts are below, and other parts of the suite in
    test_gpu_suite.py in such an environment."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    write_sitecustomize(tmp_path, QUICKLY)
    command = [sys.executable, "-m", "bench.gpu.engine", "--small", "--out", str(out), "--work", str(work)]
    done = subprocess.run(
        command, check=False, env=gpu_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told = json.loads((out / "engine.json").read_text())
    rows = {part: [row for row in told["rows"] if row["part"] == part] for part in PARTS}
    assert all(row["ok"] for row in told["rows"])
    assert all(rows.values())
    assert {row["adapter"] for row in rows["compare"]} == {"base", "all", "some"}
    assert all(row["same_tokens"] == 1.0 and row["values"] for row in rows["compare"])
    resident, churning = rows["churn"]
    assert resident["copies"] == 0 < churning["evictions"]
    assert 0 < resident["p50_ms"] <= resident["p99_ms"]
    assert rows["starve"][0]["times"] > 0
    assert rows["preempt"][0]["preemptions"] > 0
    assert rows["preempt"][0]["same_tokens"] == rows["starve"][0]["same_tokens"] == 1.0
    assert not list(work.iterdir())


def test_a_wrong_adapter_is_told_and_the_parts_go_on(tmp_path, monkeypatch):
    right = LoraLauncher.expand

    def wrong(self, layer, group, y):
        right(self, layer, group, y)
        y.mul_(1.1)

    monkeypatch.setattr(LoraLauncher, "expand", wrong)
    monkeypatch.setattr(product._Product, "churn", broken)
    for part in ("starve", "preempt"):
        monkeypatch.setattr(product._Product, part, nothing)
    shape = replace(product.SMALL, lengths=(4, 6), output=2)
    rows = list(product.run_product(shape, torch.device("cpu"), tmp_path))
    by_part = {part: [row for row in rows if row["part"] == part] for part in {row["part"] for row in rows}}
    assert [row["note"] for row in by_part["broken"]] == ["ValueError: no room"]
    adapted = {row["adapter"]: row["ok"] for row in by_part["compare"]}
    assert adapted == {"base": True, "all": False, "some": False}


def broken(self):
    raise ValueError("no room")


def nothing(self):
    return []


def test_needs_a_gpu_unless_small(capsys, tmp_path):
    if not torch.cuda.is_available():
        assert program.main(["--out", str(tmp_path)]) == 1
        assert "no CUDA device" in capsys.readouterr().err
