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
from bench.gpu.lora import LLAMA_8B, LoraCase, cold_layers, distinct, small_cases
from bench.gpu.suite import Suite, Worker, WorkerLost
from bench.gpu.ten_minutes import __main__ as command
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

    def hello(self, left_s: float) -> dict[str, Any]:
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


def test_the_start_of_a_worker_is_part_of_the_budget(tmp_path):
    clock, given = Clock(), []

    class Starting(Timed):
        def hello(self, left_s: float) -> dict[str, Any]:
            clock.now += 8.0
            return super().hello(left_s)

        def run(self, key: str, limit_s: float, left_s: float) -> dict[str, Any]:
            given.append(left_s)
            if len(given) == 1:
                raise WorkerLost("the process died")
            return super().run(key, limit_s, left_s)

    class Restarted(Suite):
        def start(self) -> Worker:
            return Starting({"one/a": 1.0, "one/b": 1.0}, clock)

    Restarted("none", tmp_path, 40.0, say=lambda _: None, lanes=1, clock=clock).run()
    assert given == [27.0, 19.0]  # five are the report's


def test_a_run_that_is_cut_decides_what_it_measured(tmp_path, monkeypatch):
    key = "kernels/gate_up, 64 rows of 64, rank 16: B sides by rows, 12 programs"

    class Cut(Timed):
        def run(self, key: str, limit_s: float, left_s: float) -> dict[str, Any]:
            if key == "ab/next":
                raise SystemExit(143)
            return super().run(key, limit_s, left_s) | {"rows": [{"expand_ms": 0.02}]}

    class Blocks(Suite):
        def start(self) -> Worker:
            return Cut({key: 4.0, "ab/next": 5.0}, Clock())

    monkeypatch.setattr(command, "Suite", Blocks)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="143"):
        command.main(["--small", "--out", str(tmp_path)])
    assert "| 20 | 25 | → B sides by rows become" in (tmp_path / "decisions.md").read_text()


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
    assert sum(BLOCKS.values()) <= 550  # of the default budget of 555, without the report
    right = [key.removeprefix("right/") for key in cases if key.startswith("right/")]
    forms = {form for decision in DECISIONS for form in decision.forms}
    assert all(any(name.startswith(form) for name in right) for form in forms)
    counted = [key.rpartition(": ")[2] for key in cases if key.startswith("counters/")]
    assert sorted(counted) == ["B sides by rows, 12 programs", "as it is"]


def test_each_side_alone_reads_more_than_a_cache_holds():
    (gate_up,) = (group for group in LLAMA_8B if group.key == "gate_up")

    def layers(rows: int, adapters: int) -> int:
        return cold_layers(LoraCase("", (gate_up,), (16,) * adapters, distinct(rows, adapters)))

    # A sides: 64 · 16 · 2 · 4,096 · 2 bytes of tiles and 64 · 4,096 · 2 of x.
    assert layers(64, 64) == 16
    assert layers(64, 8) == 64  # the most; they read 2.6 MB


def test_the_outcome_that_was_measured_is_marked():
    widest = "gate_up, 64 rows of 64, rank 16"
    rows = [
        {"contender": "by rows and by strips", "both_us": 30.0},
        {"contender": "vllm 1", "both_us": 240.0},
        {"contender": "sglang 2", "both_us": 40.0},
        {"contender": "sglang 2, K split", "both_us": 20.0, "ok": True},
        {"contender": "sglang 2, wrong", "both_us": 10.0, "ok": False},
        {"contender": "vllm 1, missing", "ok": False, "note": "ImportError"},
    ]
    results = {
        f"kernels/{widest}: B sides by rows, 12 programs": {"rows": [{"expand_ms": 0.031}]},
        f"kernels/{widest}: as it is": {"rows": [{"shrink_ms": 0.014}]},
        f"kernels/{widest}: A sides by rows": {"rows": [{"shrink_ms": 0.007}]},
        "ab/early: 64 rows, 8 adapters, rank 16": {"rows": [{"a_ms": 7.6, "b_ms": 7.536}]},
        f"kernels/{widest}: B sides by rows, 8 programs": {"rows": [{"expand_ms": 0.025}]},
        f"kernels/{widest}: B sides by rows, 16 programs": {"rows": [{"expand_ms": 0.01, "ok": False}]},
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


def test_a_form_that_is_wrong_is_out_whatever_its_time():
    results = {
        "ab/early: 64 rows, 8 adapters, rank 16": {"rows": [{"a_ms": 7.6, "b_ms": 6.96, "ok": True}]},
        "right/A sides early, a row an adapter": {"status": "ok", "rows": []},
        "right/replays, A sides early, a row an adapter": {"status": "wrong", "rows": []},
        "kernels/gate_up, 64 rows of 64, rank 16: B sides by rows, 12 programs": {
            "rows": [{"expand_ms": 0.02, "ok": True}]
        },
    }
    lines = table(results)
    (early,) = (at for at, line in enumerate(lines) if "that early A sides take" in line)
    assert "| 20 | 3 | A sides begin when" in lines[early]
    assert lines[early + 1] == "|  |  |  | A sides begin early |"
    assert "→ not right" in lines[early + 2]
    assert "right/replays, A sides early, a row an adapter |" in lines[early + 2]
    assert any("→ B sides by rows become the only form" in line for line in lines)
    results["right/by rows and by strips, a row an adapter"] = {"status": "lost", "rows": []}
    assert not any("→ B sides by rows become" in line for line in table(results))


class Nothing:
    """A kernel that writes nothing."""

    def __getitem__(self, _grid: object) -> Any:
        return lambda *_, **__: None


def test_hidden_values_of_the_replay_before_are_found(monkeypatch):
    decode = small_cases()[0]
    assert check_replays(decode, BENCH)["ok"]
    monkeypatch.setattr("loraplex.kernels.lora.triton_lora.shrink", Nothing())
    found = check_replays(decode, BENCH)
    assert not found["ok"]
    assert found["error"] == float("inf")


def test_steps_with_prompts_are_right_with_the_activation_recorded_too(monkeypatch):
    (case,) = (case for case in small() if case.name.startswith("prompts recorded"))
    found = case.run(BENCH)
    assert isinstance(found, dict)
    assert found["ok"], found
    for kernel in ("shrink", "gated_strips"):
        with monkeypatch.context() as broken:
            broken.setattr(f"loraplex.kernels.lora.triton_lora.{kernel}", Nothing())
            found = case.run(BENCH)
            assert isinstance(found, dict)
            assert not found["ok"], kernel


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    path = folder / "ncu"
    path.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'SAID'\n{said}\nSAID\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_counters_are_those_of_each_kernels_first_launch(tmp_path, monkeypatch):
    """A second launch of each, with an empty list, stands behind."""
    metrics = (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
        "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    )
    heading = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *metrics))
    kernels = '"0","shrink","81.5","20.0","6.1","0.2"\n"1","expand_rows","1,074.5","18.9","4.0","0"'
    kernels += '\n"2","shrink","0.1","1.0","9.0","0.0"\n"3","expand_rows","0.2","1.0","9.0","0"'
    tool(tmp_path, monkeypatch, f'==PROF== "1"\n{{"cases": []}}\n{heading}\n"","","%","%","",""\n{kernels}')
    rows = count("small", "compiled/a case", BENCH)
    assert [row["kernel"] for row in rows] == ["shrink", "expand_rows"]
    assert rows[0] == {
        "case": "a case", "kernel": "shrink", "dram_percent": 81.5, "warps_percent": 20.0, "scoreboard": 6.1,
        "barrier": 0.2,
    }  # fmt: skip
    assert rows[1]["dram_percent"] == 1074.5


def test_the_tool_ends_with_the_worker(tmp_path, monkeypatch):
    """The processes of ncu are of the worker's group, which the suite kills."""
    (tmp_path / "ncu").write_text("#!/bin/sh\ncat >/dev/null\nsh -c 'ps -o pgid= -p $$'\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(Skipped, match=rf"\b{os.getpgid(0)}$"):
        count("small", "compiled/a case", BENCH)


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
