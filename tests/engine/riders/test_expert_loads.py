"""Counts of where a mixture's routers send rows, of steps that run, and of steps that are repeated from a recording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.reports import EXPERT_IMBALANCE, EXPERTS_TOUCHED
from loraplex.kernels.numba_layers import NumbaRecordedLayers
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import FAMILIES, VOCAB, save_tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FAMILY = FAMILIES["qwen3_moe"]
PROMPT = [number * 7 % VOCAB for number in range(20)]
NUM_TOKENS = 9


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3_moe") / "base", FAMILY)


@pytest.fixture(params=["numba", "torch"])
def engine(request: pytest.FixtureRequest, base: Path, tmp_path: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine(
        base, tmp_path, dtype="float32", kernels=request.param, kv_cache_memory=8 << 20, adapter_memory=8 << 20,
        max_model_len=64,
    )  # fmt: skip
    yield engine
    engine.close()


def rows_by_transformers(base: Path, tokens: list[int]) -> dict[int, np.ndarray]:
    """Rows of these positions that its routers send to each expert, by layer."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    top_k, count = FAMILY["num_experts_per_tok"], FAMILY["num_experts"]
    layers = [
        layer for layer in range(model.config.num_hidden_layers) if layer not in FAMILY["mlp_only_layers"]
    ]
    return {
        layer: np.bincount(logits.topk(top_k).indices.flatten(), minlength=count)
        for layer, logits in zip(layers, found, strict=True)
    }


def test_rows_are_counted_as_the_routers_of_transformers_send_them(base: Path, engine: LocalEngine) -> None:
    assert engine.core.expert_rows() == {}, "steps of made-up tokens at the start are none"
    engine.add("r", PROMPT, max_tokens=NUM_TOKENS)
    recorded = mock.patch.object(
        NumbaRecordedLayers, "_record", autospec=True, side_effect=NumbaRecordedLayers._record
    )
    with recorded as records:
        engine.run()
    computed = [*PROMPT, *engine.tokens("r")[:-1]]
    expected = rows_by_transformers(base, computed)
    counted = engine.core.expert_rows()
    assert {layer: list(rows) for layer, rows in counted.items()} == {
        layer: list(rows) for layer, rows in expected.items()
    }
    assert all(sum(rows) == len(computed) * FAMILY["num_experts_per_tok"] for rows in counted.values())
    assert records.call_count <= 2 < NUM_TOKENS, "most steps are repeated from a recording"


def test_steps_are_counted_by_the_experts_that_they_touch(engine: LocalEngine) -> None:
    engine.add("r", PROMPT[:1], max_tokens=NUM_TOKENS)
    engine.run()
    found = engine.core.stats().experts
    # One row touches as many experts of a layer as are chosen, each with one row.
    assert found.touched_sum == NUM_TOKENS * FAMILY["num_experts_per_tok"]
    assert found.touched[EXPERTS_TOUCHED.index(4)] == sum(found.touched) == NUM_TOKENS
    assert found.imbalance[EXPERT_IMBALANCE.index(1.0)] == found.imbalance_sum == NUM_TOKENS
    engine.add("prompt", PROMPT * 2, max_tokens=1)
    before = {layer: np.array(rows) for layer, rows in engine.core.expert_rows().items()}
    engine.run()
    loads = np.array([rows - before[layer] for layer, rows in engine.core.expert_rows().items()])
    touched = (loads > 0).sum(1)
    after = engine.core.stats().experts
    assert after.touched_sum - found.touched_sum == pytest.approx(touched.mean())
    imbalance = (loads.max(1) / (loads.sum(1) / touched)).mean()
    assert after.imbalance_sum - found.imbalance_sum == pytest.approx(imbalance)
    assert imbalance > 1


def test_measured_steps_touch_as_many_experts_as_tokens_do(base: Path, tmp_path: Path) -> None:
    """What drafts cost is measured at the start: rows of one token would all go to the same experts."""
    touched: dict[int, list[float]] = {}
    collect = ModelRunner.collect

    def noted(runner: ModelRunner, handle: Any) -> StepResult:
        result = collect(runner, handle)
        if result.experts is not None and result.experts.loads.any():
            loads = result.experts.loads
            rows = int(loads[0].sum()) // FAMILY["num_experts_per_tok"]
            touched.setdefault(rows, []).append(float((loads > 0).sum(1).mean()))
        return result

    with mock.patch.object(ModelRunner, "collect", noted):
        engine = LocalEngine(
            base, tmp_path, dtype="float32", speculation="auto", kv_cache_memory=8 << 20, adapter_memory=8 << 20,
            max_model_len=64,
        )  # fmt: skip
        engine.close()
    count, top_k = FAMILY["num_experts"], FAMILY["num_experts_per_tok"]
    for rows in (4, 8, 16):
        by_chance = count * (1 - (1 - top_k / count) ** rows)
        assert max(touched[rows]) >= 0.8 * by_chance, rows
