"""What steps cost by their rows, measured at the start of an engine."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex.engine.execution.cost_measurement import measure_step_costs
from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.scheduling.step_costs import FEW_ROWS, MANY_ROWS, NotMeasured
from loraplex.engine.types import StepPlan, StepResult
from loraplex.kernels.attention import BLOCK_SIZE

LIMITS = StepLimits(max_rows=256, max_sequences=64, max_blocks=64)


class TimedRunner:
    """Takes `seconds(rows)` of its own clock for a step. `busy` maps the number of a step to what it takes more."""

    def __init__(self, row_s: float, step_s: float = 0.0, busy: dict[int, float] | None = None) -> None:
        self.now = 0.0
        self.rows: list[int] = []
        self.plans: list[StepPlan] = []
        self.failed: dict[int, str] = {}
        self._times = (step_s, row_s)
        self._busy = busy or {}

    def clock(self) -> float:
        return self.now

    def submit(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        (scheduled,) = plan.scheduled
        self.rows.append(scheduled.num_tokens)
        step_s, row_s = self._times
        self.now += step_s + row_s * scheduled.num_tokens + self._busy.get(len(self.rows) - 1, 0.0)
        return plan

    def collect(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, ((0,),), dict(self.failed))


def measure(runner: Any, limits: StepLimits = LIMITS) -> Any:
    return measure_step_costs(runner, limits, runner.clock)


def test_every_row_of_a_measured_step_is_sampled_behind_a_context() -> None:
    runner = TimedRunner(0.0001)
    measure(runner)
    for plan in runner.plans:
        (scheduled,) = plan.scheduled
        assert scheduled.samples
        assert len(scheduled.drafted) == scheduled.num_tokens - 1 == len(scheduled.token_ids) - 1
        assert scheduled.start > 256
        assert set(scheduled.block_ids) == {0}
        assert len(scheduled.block_ids) * BLOCK_SIZE >= scheduled.start + scheduled.num_tokens


def test_the_times_become_costs() -> None:
    costs = measure(TimedRunner(0.0001, 0.0009))
    for rows in FEW_ROWS + MANY_ROWS:
        assert costs.cost(rows) == pytest.approx((0.0009 + 0.0001 * rows) / 0.001)


def test_a_busy_moment_changes_no_cost() -> None:
    """One that takes the first step of all, and the first try of each of the small sizes."""
    busy = dict.fromkeys(range(1 + len(FEW_ROWS)), 0.003)
    found, expected = (measure(TimedRunner(0.0001, 0.0009, during)) for during in (busy, None))
    assert found.by_rows == pytest.approx(expected.by_rows)


def test_a_small_model_takes_few_steps() -> None:
    runner = TimedRunner(0.0001)
    measure(runner)
    assert len(runner.rows) <= 30


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.03, 0.1])
def test_measuring_ends_within_a_second(step_s: float) -> None:
    runner = TimedRunner(step_s / 10, step_s)
    costs = measure(runner)
    assert runner.now < 1.0
    assert costs.cost(8) == pytest.approx(1.8 / 1.1)


def test_of_a_slow_model_three_sizes_are_measured() -> None:
    runner = TimedRunner(0.1, 2.0)
    costs = measure(runner)
    assert runner.rows == [1, 1, 4, 8]
    assert costs.cost(8) == pytest.approx(2.8 / 2.1)


def test_no_step_is_larger_than_steps_may_be() -> None:
    for limits in (
        StepLimits(max_rows=6, max_sequences=64, max_blocks=64),
        StepLimits(max_rows=256, max_sequences=6, max_blocks=64),
    ):
        runner = TimedRunner(0.001)
        measure(runner, limits)
        assert max(runner.rows) == 5
    runner = TimedRunner(0.001)
    measure(runner, StepLimits(max_rows=256, max_sequences=64, max_blocks=1))
    assert max(plan.scheduled[0].start + plan.scheduled[0].num_tokens for plan in runner.plans) == BLOCK_SIZE


def test_one_row_has_no_costs() -> None:
    with pytest.raises(NotMeasured, match="room for one row only"):
        measure(TimedRunner(0.001), StepLimits(max_rows=256, max_sequences=1, max_blocks=64))


def test_a_step_that_fails_gives_no_costs() -> None:
    runner = TimedRunner(0.001)
    runner.failed = {0: "the logits of this row are not finite"}
    with pytest.raises(NotMeasured, match="not finite"):
        measure(runner)
