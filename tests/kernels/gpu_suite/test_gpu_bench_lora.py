"""The GPU suite's cases for batched LoRA run anywhere, and notice what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.gpu import lora
from bench.gpu.timing import Ceilings
from loraplex.kernels.lora.triton_lora import LoraLauncher
from loraplex.kernels.lora.triton_plan import LoraPlanner
from loraplex.kernels.lora.triton_tiling import ROW_ROWS, LoraTiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.mark.parametrize(
    "case", lora.small_cases() + lora.engine_cases(small=True), ids=lambda case: case.name
)
def test_small_cases_are_right(case: lora.LoraCase) -> None:
    result = lora.run_case(case, DEVICE, Ceilings())
    assert result["ok"], result
    assert result["graph_error"] is not None
    assert result["floor_ms"] > 0
    assert (result["graph_ms"] is None) == (DEVICE.type == "cpu")


def test_a_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LoraLauncher.expand

    def wrong(self: LoraLauncher, layer: int, group: str, y: torch.Tensor) -> None:
        right(self, layer, group, y)
        y[1] += 0.01

    monkeypatch.setattr(LoraLauncher, "expand", wrong)
    assert not lora.run_case(lora.small_cases()[0], DEVICE)["ok"]


def test_every_full_case_can_be_planned() -> None:
    names = set()
    for case in lora.full_cases() + lora.engine_cases(small=False):
        names.add(case.name)
        planner = LoraPlanner(case.groups, case.max_rank // 8, case.tiling, 528)
        widest = np.repeat(np.array(case.ranks, np.int32)[:, None] // 8, len(case.groups), axis=1)
        into = np.zeros(planner.capacity(case.num_rows, len(case.rows)), np.int32)
        step = planner.write(case.segments, widest, case.num_rows, into)
        assert step.hidden <= planner.hidden_capacity(case.num_rows, len(case.rows), fixed=False)
        assert step.hidden * 4 < 1 << 30
        num_bytes, flops = lora.work(case)
        assert num_bytes > 0
        assert flops > 0
    assert len(names) == len(lora.full_cases()) + len(lora.engine_cases(small=False))


def test_checks_of_the_engines_tilings_reach_both_kinds_of_pieces_in_bfloat16() -> None:
    cases = lora.engine_cases(small=False)
    assert {case.dtype for case in cases} == {torch.bfloat16}
    assert {case.tiling for case in cases} == {LoraTiling()}
    counts = [count for case in cases for _, count in case.rows]
    assert min(counts) <= ROW_ROWS < LoraTiling().large_rows < max(counts)


def test_the_floor_of_the_8b_decode_is_its_tiles() -> None:
    """2.62 MB an adapter of rank 16 and layer: 83.9 MB a model of 32 layers."""
    case = lora.full_cases()[1]
    tiles = 64 * 16 * (3 * 4096 + 6144 + 2 * 4096 + 2 * 4096 + 28672 + 14336 + 4096) * 2
    rows = 64 * (3 * 4096 + 14336 + 2 * (6144 + 4096 + 28672 + 4096)) * 2
    assert lora.work(case)[0] == tiles + rows
