"""The first ten minutes on a GPU: the order of blocks, what is asked of a case, and what follows from a figure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.case import Bench, Skipped
from bench.gpu.lora import small_cases
from bench.gpu.suite import Suite, Worker, WorkerLost
from bench.gpu.ten_minutes.cases import BLOCKS, check_replays, count, full, small
from bench.gpu.ten_minutes.decisions import DECISIONS, table
from support.kernels.gpu_machine import QUICKLY, gpu_environment, write_sitecustomize

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
BENCH = Bench(torch.device("cpu"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Worker):
    """Cases that take the seconds of a table, on a clock that they move."""

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock

    def hello(self) -> dict[str, Any]:
        cases = [{"key": key, "limit_s": 60.0, "alone": "beside" not in key} for key in self._seconds]
        environment = {"torch": "2.0", "triton": "3.0", "device": "none", "python": "3"}
        return {"environment": environment, "cases": cases}

    def run(self, key: str, limit_s: float, left_s: float) -> dict[str, Any]:
        taken = self._seconds[key]
        self._clock.now += min(taken, left_s)
        if taken > left_s:
            raise WorkerLost("the budget was spent", cut=True)
        return {"case": key, "status": "ok", "rows": [], "note": "", "seconds": taken, "leaving": False}

    def close(self) -> None: ...


def journal(out: Path) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return [(line["case"], line["status"]) for line in lines if "case" in line]


def test_each_block_has_its_seconds_and_what_one_leaves_comes_last(tmp_path):
    clock = Clock()
    seconds = {"one/a": 4.0, "one/beside": 5.0, "one/c": 3.0, "two/a": 6.0, "two/b": 30.0}

    class Blocks(Suite):
        def start(self) -> Worker:
            return Timed(seconds, clock)

    options: dict[str, Any] = {"lanes": 1, "blocks": {"one": 10.0, "two": 10.0}, "clock": clock}
    assert Blocks("none", tmp_path, 40.0, say=lambda _: None, **options).run()
    assert journal(tmp_path) == [
        ("one/a", "ok"), ("one/beside", "ok"), ("one/c", "cut"),
        ("two/a", "ok"), ("two/b", "cut"),
        ("one/c", "ok"), ("two/b", "cut"),
    ]  # fmt: skip
    assert clock.now == 35.0  # five are the report's
    assert Blocks("none", tmp_path, 60.0, say=lambda _: None, **options).run()
    assert journal(tmp_path)[7:] == [("two/b", "cut"), ("two/b", "ok")]


class Asked(dict[str, Any]):
    """Results without any, which remembers whose were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return default


def test_what_decides_is_among_the_cases():
    cases = {case.key for case in full("vllm 1", "sglang 2")}
    asked = Asked()
    assert [decision.measure(asked) for decision in DECISIONS] == [None] * len(DECISIONS)
    assert asked.keys_asked <= cases
    assert (
        {key.partition("/")[0] for key in cases}
        == {*BLOCKS}
        == {case.key.partition("/")[0] for case in small()}
    )
    assert sum(BLOCKS.values()) <= 600


def test_the_outcome_that_was_measured_is_marked():
    widest = "gate_up, 64 rows of 64, rank 16"
    rows = [
        {"contender": "by rows and by strips", "both_us": 30.0},
        {"contender": "vllm 1", "both_us": 240.0},
        {"contender": "sglang 2", "both_us": 40.0},
        {"contender": "sglang 2, K split", "both_us": 20.0},
    ]
    results = {
        f"kernels/{widest}: B sides by rows, 12 programs": {"rows": [{"expand_ms": 0.031}]},
        f"kernels/{widest}: as it is": {"rows": [{"shrink_ms": 0.014}]},
        f"kernels/{widest}: A sides by rows": {"rows": [{"shrink_ms": 0.007}]},
        "ab/early: 64 rows, 8 adapters, rank 16": {"rows": [{"a_ms": 7.6, "b_ms": 7.536}]},
        f"kernels/{widest}: B sides by rows, 8 programs": {"rows": [{"expand_ms": 0.025}]},
        f"peers/{widest}": {"rows": rows},
        "ab/gemv: 64 rows, 8 adapters, rank 16": {"rows": [{"base_ms": 6.8, "a_ms": 9.1, "b_ms": 7.6}]},
    }
    lines = "\n".join(table(results))
    assert "| B side of gate_up by rows, 64 of 64, µs | 31 | 25 | B sides" in lines
    assert "|  |  | 50 | → the counters say which" in lines
    assert "| 12 programs by rows ÷ the fastest of 8, 12 and 16 | 1.24 | 1.03 | 12 stay |" in lines
    assert "vllm's, gate_up, 64 of 64 | 0.125 | 1 | → ours are faster |" in lines
    assert "sglang's, gate_up, 64 of 64 | 1.5 | 1 | ours are faster |" in lines
    assert "| LoRA ÷ base by rows, 64 rows of 8 | 0.895 | 0.88 | not reached" in lines
    assert "÷ as it is, gate_up, 64 of 64 | 0.5 | 0.97 | → A sides by rows" in lines
    assert "take from a layer, 64 rows of 8 | 2 | 3 | → A sides begin when x is there" in lines
    assert lines.count("→") == 7
    assert "| LoRA ÷ base by rows, 256 rows of 64 | not measured | 0.82 |" in lines


def test_hidden_values_of_the_replay_before_are_found(monkeypatch):
    decode = small_cases()[0]
    assert check_replays(decode, BENCH)["ok"]

    class Nothing:
        def __getitem__(self, _grid: object) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.shrink", Nothing())
    found = check_replays(decode, BENCH)
    assert not found["ok"]
    assert found["error"] == float("inf")


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'SAID'\n{said}\nSAID\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_counters_are_read_from_what_the_tool_prints(tmp_path, monkeypatch):
    metrics = (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    )
    heading = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
    kernels = '"0","shrink","81.5","20.0","6.1","0.2"\n"1","expand_rows","1,074.5","18.9","4.0","0"'
    tool(tmp_path, monkeypatch, f'==PROF== "1"\n{{"cases": []}}\n{heading}\n"","","%","%","",""\n{kernels}')
    rows = count("small", "compiled/a case", BENCH)
    assert [row["kernel"] for row in rows] == ["shrink", "expand_rows"]
    assert rows[0] == {
        "case": "a case", "kernel": "shrink", "dram_percent": 81.5, "warps_percent": 20.0, "scoreboard": 6.1,
        "barrier": 0.2,
    }  # fmt: skip
    assert rows[1]["dram_percent"] == 1074.5


def test_counters_are_skipped_where_the_tool_may_not_count(tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(Skipped, match="ERR_NVGPUCTRPERM"):
        count("small", "compiled/a case", BENCH)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Skipped, match="not installed"):
        count("small", "compiled/a case", BENCH)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_blocks_run_without_a_gpu(tmp_path):
    write_sitecustomize(tmp_path, QUICKLY)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.gpu.ten_minutes", "--small", "--out", str(out), "--budget", "800"]
    done = subprocess.run(
        command, check=False, env=gpu_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {case: status for case, status in journal(out) if status != "cut"}
    assert set(found) == {case.key for case in small()}
    skipped = {case for case, status in found.items() if status == "skipped"}
    assert {case.partition("/")[0] for case in skipped} == {"counters", "peers"}
    assert "not measured" in (out / "decisions.md").read_text()
