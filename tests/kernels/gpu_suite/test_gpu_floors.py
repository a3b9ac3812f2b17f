"""The numbers of docs/performance.md are those of its formula, and the launches in it are those of the code."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.decoding import floors
from bench.gpu.steps import SMALL, StepBench
from bench.gpu.timing import Ceilings
from loraplex.engine.config import MAX_RECORDED_ROWS
from loraplex.engine.execution.cuda_graphs import prompt_graph_sizes
from loraplex.engine.sizing import REFERENCE_LAYERS, REFERENCE_WEIGHTS, most_recorded_rows

PAGE = Path(__file__).parents[3] / "docs/performance.md"


@pytest.mark.parametrize(
    "table", [floors.floors_table, floors.launches_table, floors.prediction_table, floors.prompts_table]
)
def test_tables_of_the_page_are_what_the_formula_gives(table):
    assert "\n".join(table()) in PAGE.read_text("utf-8")


def test_sizes_of_the_page():
    assert (round(floors.PRODUCTS / 1e9, 1), floors.POSITION_BYTES) == (7.5, 128 << 10)
    assert round(floors.RANK_BYTES / 1e6, 2) == 5.24
    assert (floors.launches(0), floors.launches(8)) == (334, 590)
    assert (floors.mixed_launches(0), floors.mixed_launches(8)) == (366, 622)


def test_what_is_recorded_where_no_setting_says_gains_by_the_formula():
    """With 8 adapters up to the largest recorded size, and no further; without, up to half of it."""
    for gpu, capability in ((floors.H200, (9, 0)), (floors.GPUS[1], (8, 0)), (floors.GPUS[2], (8, 9))):
        most = most_recorded_rows(-1, capability, REFERENCE_LAYERS, REFERENCE_WEIGHTS)
        gains = [
            size
            for size in prompt_graph_sizes(MAX_RECORDED_ROWS)
            if floors.one_by_one_ms(gpu, size, 8) > floors.recorded_ms(gpu, size, 8)
        ]
        assert max(gains, default=0) == most
    assert floors.one_by_one_ms(floors.H200, 320, 0) > floors.recorded_ms(floors.H200, 320, 0)
    assert floors.one_by_one_ms(floors.H200, 384, 0) < floors.recorded_ms(floors.H200, 384, 0)


class Products(TorchDispatchMode):
    """Counts matrix products of torch."""

    def __init__(self, counts):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::linear"):
            self._counts["linear"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.soak
@pytest.mark.usefixtures("quick_interpreter")
def test_launches_of_a_layer(monkeypatch):
    """What a recorded step of two layers launches more than one of one layer."""
    from triton.runtime import interpreter

    counts: Counter[str] = Counter()
    run_grid = interpreter.GridExecutor.__call__

    def launch(self, *args, **kwargs):
        counts[self.fn.__name__] += 1
        run_grid(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    found = {}
    size = replace(SMALL.size, prompt_sizes=(24,))
    for layers in (1, 2):
        shape = replace(SMALL, changes={**SMALL.changes, "num_hidden_layers": layers}, size=size)
        bench = StepBench(shape, torch.device("cpu"), Ceilings())
        for kind, make in (("decodes", bench.decoding_runs), ("prompts", bench.mixed_runs)):
            for run, adapters in zip(make(2, 2, 8), (0, 2), strict=True):
                counts.clear()
                with torch.inference_mode(), Products(counts):
                    run()
                found[kind, layers, adapters] = counts.copy()
    for kind, extra in (("decodes", 0), ("prompts", floors.PROMPT_LAUNCHES)):
        more = {adapters: found[kind, 2, adapters] - found[kind, 1, adapters] for adapters in (0, 2)}
        assert more[0].total() == floors.LAYER_LAUNCHES + extra, more[0]
        assert more[2].total() == floors.LAYER_LAUNCHES + floors.LORA_LAUNCHES + extra, more[2]
        assert found[kind, 1, 0].total() - more[0].total() <= floors.OTHER_LAUNCHES
