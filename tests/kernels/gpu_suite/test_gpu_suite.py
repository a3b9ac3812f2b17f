"""The GPU suite: its cases fit their machine, and run tiny and interpreted without one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.gpu import catalogue, lora
from bench.gpu.suite import AB_NAMES
from loraplex.adapters.device.layout import ArenaLayout, place_tiles
from loraplex.kernels.lora.dispatch import CHUNK
from support.kernels.gpu_machine import QUICKLY, gpu_environment, write_sitecustomize


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_kinds_of_cases_without_a_gpu_and_without_an_installation(tmp_path):
    """Run the suite as on a GPU machine, where only the files and the wheels are."""
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


def test_each_switch_has_cases():
    for name in AB_NAMES:
        assert len(catalogue.small_ab(name)) == len({case.key for case in catalogue.small_ab(name)}) > 0
        assert len(catalogue.full_ab(name)) > 1


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
