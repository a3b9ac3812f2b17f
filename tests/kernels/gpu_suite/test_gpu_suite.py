"""The GPU suite runs anywhere, tiny and interpreted; what crashes, hangs or is cut off loses nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import catalogue, lora, report
from bench.gpu.decoding.profile import part_of
from bench.gpu.suite import Journal, Suite
from loraplex.adapters.device.layout import ArenaLayout, place_tiles
from loraplex.kernels.lora.dispatch import CHUNK
from support.kernels.gpu_machine import QUICKLY, gpu_environment, write_sitecustomize


def suite(out: Path, cases: str, **options) -> tuple[Suite, list[str]]:
    said: list[str] = []
    made = Suite(
        f"support.kernels.gpu_suite_cases:{cases}",
        out,
        **{"budget_s": 120, "lanes": 2, "commit": "abc", "environment": gpu_environment(), "say": said.append}
        | options,
    )
    return made, said


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    out = tmp_path_factory.mktemp("broken")
    made, said = suite(out, "cases")
    assert not made.run()
    return out, said


def test_failing_case_leaves_other_results(broken):
    out, said = broken
    found = {line["case"]: line for line in lines(out)[1:]}
    assert {key: line["status"] for key, line in found.items()} == {
        "checks/right": "ok",
        "checks/wrong": "wrong",
        "checks/raises": "failed",
        "steps/dies": "lost",
        "steps/held": "ok",
        "steps/hangs": "lost",
        "steps/prints": "ok",
        "steps/infinite": "ok",
    }
    assert len(said) == len(found)
    assert "ValueError: out of | memory" in found["checks/raises"]["note"]
    assert "exit status -9" in found["steps/dies"]["note"]
    assert "no answer within 1 s" in found["steps/hangs"]["note"]
    assert found["steps/infinite"]["rows"] == [{"rows": 3, "lora_to_base": "inf"}]


def test_the_report_tells_all(broken):
    out, _ = broken
    told = (out / "results.md").read_text()
    assert "cpu, interpreted" in told
    assert "no time here says anything of a GPU" in told
    assert "4 ok, 1 wrong, 1 failed, 2 lost, 0 skipped, 0 not run" in told
    assert "| b | **no** |" in told
    assert "steps/hangs: lost, no answer within 1 s" in told
    assert "out of \\| memory" in told
    whole = json.loads((out / "results.json").read_text())
    assert len(whole["results"]) == 8
    assert whole["runs"][0]["identity"]["commit"] == "abc"
    assert f"python {whole['runs'][0]['environment']['python']}" in told


def test_interrupted_run_counts_and_is_resumed(tmp_path):
    now = 0.0

    def say(line: str) -> None:
        nonlocal now
        now += 114 if "first" in line else 1

    made, _ = suite(tmp_path, "slow_cases", budget_s=120, clock=lambda: now, say=say)
    assert made.run()
    assert [(line["case"], line["status"]) for line in lines(tmp_path)[1:]] == [
        ("steps/first", "ok"),
        ("steps/second", "cut"),
    ]
    assert (
        "## Not run, for want of time\n\n- steps/second\n- steps/third"
        in (tmp_path / "results.md").read_text()
    )
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"case": "steps/third", "sta')  # a run that was killed as it wrote
    made, said = suite(tmp_path, "slow_cases", only=("third",))
    assert made.run()
    assert len(said) == 1
    made, said = suite(tmp_path, "slow_cases", commit="another")
    with pytest.raises(ValueError, match="another commit"):
        made.run()
    assert said == []


@pytest.mark.slow
def test_building_for_others_is_not_part_of_a_cases_limit(tmp_path):
    made, _ = suite(tmp_path, "building_cases")
    assert made.run() is False
    found = {line["case"].partition("/")[2]: line for line in lines(tmp_path)[1:]}
    assert {name: line["status"] for name, line in found.items()} == {
        "builds and dies": "lost",
        "builds again": "ok",
        "builds, then hangs": "lost",
        "is built": "ok",
    }
    assert "exit status -9" in found["builds and dies"]["note"]
    assert "no answer within" in found["builds, then hangs"]["note"]


@pytest.mark.parametrize(
    ("name", "value", "resumed"),
    [
        ("driver", "580.95.06", True),
        ("torch", "2.11.1+cu130", True),
        ("torch", "2.12.0+cu130", False),
        ("triton", "3.7.0", False),
        ("device", "NVIDIA A100-SXM4-80GB", False),
    ],
)
def test_run_is_resumed_unless_what_matters_differs(tmp_path, name, value, resumed):
    machine = {"python": "3.12", "torch": "2.11.0+cu130", "triton": "3.6.0", "device": "NVIDIA H200"}
    for environment in (machine, {**machine, name: value}):
        made, _ = suite(tmp_path, "cases")
        made._journal = Journal(tmp_path / "results.jsonl")
        if environment == machine or resumed:
            made._begin(environment)
        else:
            with pytest.raises(ValueError, match=f"another {name}"):
                made._begin(environment)
    assert len(Journal(tmp_path / "results.jsonl").runs) == 1 + resumed


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(True, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_all_kinds_of_cases_without_a_gpu_and_without_an_installation(every: bool, tmp_path):
    """As on a GPU machine, with nothing of ours but the files and the wheels. The short version has one case of each
    kind."""
    write_sitecustomize(tmp_path, QUICKLY)
    out = tmp_path / "out"
    keys = [case.key for case in catalogue.small()]
    if not every:
        keys = list({key.partition("/")[0]: key for key in reversed(keys)}.values())
    command = [sys.executable, "-m", "bench.gpu.suite", "--small", "--out", str(out), "--budget", "800"]
    command += [part for key in keys for part in ("--only", key)]
    done = subprocess.run(
        command, check=False, env=gpu_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = {line["case"]: line for line in lines(out)[1:]}
    assert set(found) == set(keys)
    assert all(line["rows"] for line in found.values())
    told = (out / "results.md").read_text()
    for title in ("The engine beside transformers", "A decoding step, recorded", "The host's side of a step"):
        assert f"## {title}" in told


def test_the_whole_catalogue_is_in_order_of_importance():
    keys = [case.key for case in catalogue.full()]
    assert len(set(keys)) == len(keys)
    sections = [key.partition("/")[0] for key in keys]
    assert (
        sections.index("checks")
        < sections.index("equality")
        < sections.index("steps")
        < sections.index("lora")
    )
    # Of rows, adapters and ranks, all that a step can have.
    wanted = {
        (rows, adapters, rank)
        for rows in (1, 16, 64, 256)
        for adapters in (1, 8, 64, 256)
        for rank in (8, 16, 64)
        if adapters <= rows
    }
    listed = {key for key in keys if key.startswith("steps/")}
    assert {f"steps/{r} rows, {a} adapters, rank {k}" for r, a, k in wanted} <= listed


def test_report_compares_targets_with_measurements(tmp_path):
    """Its cases are there, and a figure that misses is told."""
    assert {aim.case for aim in report._AIMS} <= {case.key for case in catalogue.full()}
    rows = {"steps/64 rows, 8 adapters, rank 16": {"lora_to_base": 0.96, "base_times_floor": 1.5}}
    results = {key: {"case": key, "status": "ok", "rows": [row]} for key, row in rows.items()}
    run = {
        "identity": {"device": "a device", "commit": "abc"},
        "environment": {"driver": "1.2"},
        "started": "now",
        "command": "this",
    }
    report.write_report(tmp_path, [run], [*results, "activation/rank 16"], results)
    told = (tmp_path / "results.md").read_text()
    assert "| LoRA ÷ base, 64 rows of 8 adapters | ≥ 0.95 | 0.960 | yes |" in told
    assert "| base ÷ floor, 64 rows | ≤ 1.35 | 1.500 | **no** |" in told
    assert "- activation/rank 16" in told


@pytest.mark.parametrize(
    "case", [case for case in catalogue.full() if case.section == "steps"], ids=lambda c: c.name
)
def test_the_adapters_of_every_step_have_room(case):
    shape, _, (_, adapters, rank) = case.run.args
    layout = ArenaLayout(lora.LLAMA_8B, 32, shape.dtype, max_rank=shape.size.max_rank)
    sizes = [layout.tile_bytes(features) for pair in layout.features for features in pair]
    pages = place_tiles(sizes * 32 * (rank // CHUNK), layout.page_bytes)[1]
    assert adapters <= shape.size.slots
    assert adapters * pages * layout.page_bytes <= shape.size.arena_bytes


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("shrink", "LoRA, A side"),
        ("expand", "LoRA, B side"),
        ("expand_rotary", "LoRA, B side with RoPE and KV write"),
        ("expand_gated", "LoRA, B side with the activation"),
        ("nvjet_hsh_128x64_64x8_1x2_h_bz_TNT", "linears"),
        ("attention_program", "attention"),
        ("void at::native::elementwise_kernel<128>", "other: void at::native::elementwise_kernel<128>"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, part):
    assert part_of(kernel) == part
