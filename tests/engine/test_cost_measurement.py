"""What steps cost by their rows, measured at the start of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.execution.cost_measurement import measure_step_times
from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.execution.step_results import RowFailure, RowResult, StepResult
from loraplex.engine.scheduling.timing.step_costs import FEW_ROWS, MANY_ROWS, NotMeasured
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepLoad, StepTimes
from loraplex.engine.types import ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE
from support.engine.local_engine import LocalEngine
from support.models.checkpoints import save_tiny

LIMITS = StepLimits(max_rows=256, max_sequences=64, max_blocks=64)


class TimedRunner:
    """Takes a time by its own clock for a step: for itself, for each row, and for each attended, sampled and scored
    position. `busy` maps the number of a step to what it takes more."""

    num_groups, num_windows, vocab_size = 1, 0, 1000

    def __init__(
        self,
        row_s: float,
        step_s: float = 0.0,
        busy: dict[int, float] | None = None,
        *,
        pair_s: float = 0.0,
        sample_s: float = 0.0,
        score_s: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.rows: list[int] = []
        self.plans: list[StepPlan] = []
        self.failed: RowFailure | None = None
        self._times = (step_s, row_s)
        self._each = (pair_s, sample_s, score_s)
        self._busy = busy or {}

    def clock(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        (scheduled,) = plan.scheduled
        self.rows.append(scheduled.num_tokens)
        step_s, row_s = self._times
        pair_s, sample_s, score_s = self._each
        load = StepLoad.of(plan.scheduled)
        self.now += step_s + row_s * load.rows + self._busy.get(len(self.rows) - 1, 0.0)
        self.now += pair_s * load.pairs + sample_s * load.sampled + score_s * load.scored
        return plan

    @property
    def sampled(self) -> list[ScheduledSequence]:
        """The slices that are sampled: those of steps whose rows all are."""
        return [row for plan in self.plans for row in plan.scheduled if row.samples]

    @property
    def prompts(self) -> list[ScheduledSequence]:
        return [row for plan in self.plans for row in plan.scheduled if not row.samples]

    def collect(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, [RowResult((0,), failed=self.failed)])


def measure(runner: Any, limits: StepLimits = LIMITS) -> MeasuredTimes:
    return measure_step_times(runner, limits, runner.clock)


def test_every_row_of_a_decoding_step_is_sampled_behind_a_context() -> None:
    runner = TimedRunner(0.0001)
    measure(runner)
    assert {row.num_tokens for row in runner.sampled} == {*FEW_ROWS, *MANY_ROWS}
    for scheduled in runner.sampled:
        assert len(scheduled.drafted) == scheduled.num_tokens - 1 == len(scheduled.token_ids) - 1
        assert scheduled.start > 256
        assert set(scheduled.block_ids) == {0}
        assert len(scheduled.block_ids) * BLOCK_SIZE >= scheduled.start + scheduled.num_tokens


def test_no_row_of_a_prompts_step_is_sampled() -> None:
    runner = TimedRunner(0.0001)
    measure(runner)
    assert max(row.num_tokens for row in runner.prompts) == LIMITS.max_rows
    for scheduled in runner.prompts:
        assert not scheduled.drafted
        assert set(scheduled.block_ids) == {0}
        assert len(scheduled.block_ids) * BLOCK_SIZE >= scheduled.start + scheduled.num_tokens


def test_each_kind_of_work_has_its_time() -> None:
    """As many steps behind a long context as behind a short one, so that what is not attention cancels out."""
    runner = TimedRunner(0.0001, 0.0009, pair_s=2e-8, sample_s=3e-5, score_s=7e-5)
    found = measure(runner, StepLimits(max_rows=256, max_sequences=64, max_blocks=512))
    assert found.pair == pytest.approx(2e-8)
    assert found.sample == pytest.approx(3e-5, rel=0.02)
    assert found.score == pytest.approx(7e-5)
    assert found.rows[256] == pytest.approx(0.0009 + 0.0001 * 256, rel=0.05)
    assert list(found.rows) == sorted(found.rows)


def test_the_times_become_costs() -> None:
    costs = measure(TimedRunner(0.0001, 0.0009)).costs
    for rows in FEW_ROWS + MANY_ROWS:
        assert costs.cost(rows) == pytest.approx((0.0009 + 0.0001 * rows) / 0.001)


def test_a_busy_moment_changes_no_cost() -> None:
    """One that takes the first step of all, and the first try of each of the small sizes."""
    busy = dict.fromkeys(range(1 + len(FEW_ROWS)), 0.003)
    found, expected = (measure(TimedRunner(0.0001, 0.0009, during)).costs for during in (busy, None))
    assert found.by_rows == pytest.approx(expected.by_rows)


def test_a_small_model_takes_few_steps() -> None:
    runner = TimedRunner(0.0001)
    measure(runner)
    assert len(runner.sampled) <= 30
    assert len(runner.prompts) <= 18


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03, 0.1])
def test_measuring_ends_within_a_second_for_each_part(step_s: float) -> None:
    """Decoding steps, those of prompts, and those that show what attention and scores take."""
    runner = TimedRunner(step_s / 10, step_s)
    costs = measure(runner).costs
    assert runner.now < 3.0
    assert costs.cost(8) == pytest.approx(1.8 / 1.1)


def test_of_a_slow_model_three_sizes_are_measured() -> None:
    runner = TimedRunner(0.1, 2.0)
    found = measure(runner)
    assert runner.rows == [1, 1, 4, 8]
    assert found.costs.cost(8) == pytest.approx(2.8 / 2.1)
    assert StepTimes(found).seconds(StepLoad(8)) == pytest.approx(2.8), "a prompt's take no more"


def test_no_step_is_larger_than_steps_may_be() -> None:
    for limits in (
        StepLimits(max_rows=6, max_sequences=64, max_blocks=64),
        StepLimits(max_rows=256, max_sequences=6, max_blocks=64),
    ):
        runner = TimedRunner(0.001)
        found = measure(runner, limits)
        assert max(row.num_tokens for row in runner.sampled) == 5
        assert max(runner.rows) <= limits.max_rows
        assert len(found.rows) > 1, "or nothing is known of what rows take"
    runner = TimedRunner(0.001)
    measure(runner, StepLimits(max_rows=256, max_sequences=64, max_blocks=1))
    assert max(plan.scheduled[0].start + plan.scheduled[0].num_tokens for plan in runner.plans) == BLOCK_SIZE


def test_one_row_has_no_costs() -> None:
    with pytest.raises(NotMeasured, match="room for one row only"):
        measure(TimedRunner(0.001), StepLimits(max_rows=256, max_sequences=1, max_blocks=64))


def test_a_step_that_fails_gives_no_costs() -> None:
    runner = TimedRunner(0.001)
    runner.failed = RowFailure("the logits of this row are not finite")
    with pytest.raises(NotMeasured, match="not finite"):
        measure(runner)


# A real engine.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), {"model_type": "llama", "num_hidden_layers": 1})


@pytest.fixture
def start(base: Path, tmp_path: Path) -> Callable[..., LocalEngine]:
    def start(**settings: Any) -> LocalEngine:
        given: dict[str, Any] = {
            "kv_cache_memory": 1 << 20,
            "adapter_memory": 1 << 20,
            "adapter_cpu_memory": 1 << 20,
        }
        given |= {
            "kernels": "torch",
            "dtype": "float32",
            "num_threads": 1,
            "max_num_seqs": 8,
            "speculation": "auto",
        }
        return LocalEngine(base, tmp_path, **given | settings)

    return start


def test_an_engine_says_that_it_drafts(start: Callable[..., LocalEngine]) -> None:
    engine = start()
    engine.close()
    assert (engine.built.info.speculation, engine.built.info.speculation_reason) == (True, "")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculation": "off"}, "--speculation off"),
        ({"lookahead": 1}, "steps are planned before the tokens of the one before are known (lookahead 1)"),
        (
            {"max_num_seqs": 1},
            "what steps cost could not be measured: a step has room for one row only",
        ),
    ],
)
def test_an_engine_says_why_it_does_not(
    start: Callable[..., LocalEngine], settings: dict[str, Any], reason: str
) -> None:
    engine = start(**settings)
    engine.close()
    assert (engine.built.info.speculation, engine.built.info.speculation_reason) == (False, reason)


def test_measuring_leaves_no_trace(start: Callable[..., LocalEngine]) -> None:
    """The measured sequences are of tokens 0: what is left of them would be found as the prefix of such a prompt."""
    answers = []
    for choice in ("auto", "off"):
        engine = start(speculation=choice)
        stats = engine.core.stats()
        assert (stats.num_steps, stats.num_kv_blocks_used, stats.prefix_cache_queries) == (0, 0, 0)
        for prompt in ([0] * 40, range(3, 20)):
            engine.add(str(prompt), prompt)
            engine.run()
        assert engine.core.stats().prefix_cache_hits == 0
        answers.append([engine.tokens(request_id) for request_id in engine.events])
        engine.close()
    assert answers[0] == answers[1]


class Broken:
    """A model whose first steps fail."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.failures = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("this step cannot be computed")
        return self._model.forward(batch)


def test_a_step_that_cannot_be_measured_does_not_end_the_start(
    start: Callable[..., LocalEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = start(wrap_model=Broken)
    reason = "what steps cost could not be measured: this step cannot be computed"
    assert (engine.built.info.speculation, engine.built.info.speculation_reason) == (False, reason)
    assert f"no step is bounded by time, and speculation is off: {reason}" in caplog.messages
    engine.add("after", range(3, 10), max_tokens=3)
    engine.run()
    assert len(engine.tokens("after")) == 3
    engine.close()
