"""What steps are predicted to take, and how what they took corrects that."""

from __future__ import annotations

from dataclasses import Field, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.scheduling.timing.step_costs import MOST_ROWS, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepLoad, StepTimes

COSTS = StepCosts(tuple(1 + 0.1 * rows for rows in range(MOST_ROWS)))
MEASURED = MeasuredTimes(
    {1: 0.010, 16: 0.018, 64: 0.030, 256: 0.110}, pair=4e-7, sample=1e-4, score=3e-4, costs=COSTS
)
RECORDED = replace(MEASURED, sizes=(16, 64, 256))
COUNTS = st.integers(0, 300)
LOADS = st.builds(
    StepLoad,
    rows=COUNTS,
    pairs=st.floats(0, 2e6),
    sampled=COUNTS,
    ranks=st.integers(0, 5000),
    scored=COUNTS,
)
STEPS = st.lists(st.tuples(LOADS, st.floats(1e-4, 10)), max_size=20)


def corrected(measured: MeasuredTimes, steps: list[tuple[StepLoad, float]]) -> StepTimes:
    times = StepTimes(measured)
    for load, seconds in steps:
        times.took(load, seconds)
    return times


def test_a_step_takes_what_was_measured() -> None:
    times = StepTimes(MEASURED)
    assert times.one_row == 0.010
    for rows, seconds in MEASURED.rows.items():
        assert times.seconds(StepLoad(rows)) == seconds
    assert times.seconds(StepLoad()) == 0
    more = StepLoad(64, pairs=1e5, sampled=3, scored=7)
    assert times.seconds(more) == pytest.approx(0.030 + 0.04 + 3e-4 + 21e-4)


def test_a_row_attends_to_all_before_it_and_to_itself() -> None:
    load = StepLoad()
    load.add(100, 3, sampled=1, rank=8, scored=2)
    assert load == StepLoad(rows=3, pairs=101 + 102 + 103, sampled=1, ranks=24, scored=2)
    assert StepLoad().with_prompt(100, 3, rank=8, scored=2) == replace(load, sampled=0)


@given(
    st.sampled_from([MEASURED, RECORDED]), STEPS, LOADS, st.sampled_from(fields(StepLoad)), st.integers(1, 99)
)
def test_more_of_anything_takes_no_less(
    measured: MeasuredTimes, steps: list[tuple[StepLoad, float]], load: StepLoad, field: Field[Any], more: int
) -> None:
    times = corrected(measured, steps)
    larger = replace(load, **{field.name: getattr(load, field.name) + more})
    assert times.seconds(larger) >= times.seconds(load)


@given(
    st.sampled_from([MEASURED, RECORDED]),
    STEPS,
    LOADS,
    st.integers(0, 9000),
    st.integers(0, 256),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_most_positions_of_a_time_are_those_that_fit(
    measured: MeasuredTimes,
    steps: list[tuple[StepLoad, float]],
    load: StepLoad,
    start: int,
    count: int,
    seconds: float,
    scores: bool,
) -> None:
    times = corrected(measured, steps)
    most = times.most(load, start, count, seconds, rank=8, scores=scores)

    def fits(number: int) -> bool:
        return times.seconds(load.with_prompt(start, number, rank=8, scored=number * scores)) <= seconds

    assert 0 <= most <= count
    assert most == 0 or fits(most)
    assert most == count or not fits(most + 1)


def test_rows_are_padded_to_recorded_sizes() -> None:
    times = StepTimes(RECORDED)
    assert times.seconds(StepLoad(17)) == times.seconds(StepLoad(64)) == 0.030
    assert times.most(StepLoad(2), 0, 256, 0.04) == 62


@pytest.mark.parametrize(
    "load",
    [StepLoad(1, 500, 1), StepLoad(64, 64 * 6000), StepLoad(128, 8000, scored=128), StepLoad(9, 9e4, 9, 72)],
)
@pytest.mark.parametrize("slower", [2.0, 0.75])
def test_predictions_follow_a_machine_that_becomes_slower_or_faster(load: StepLoad, slower: float) -> None:
    times = StepTimes(MEASURED)
    right = slower * times.seconds(load)
    for _ in range(60):
        times.took(load, right)
    assert times.seconds(load) == pytest.approx(right, rel=0.1)


def test_a_mix_of_steps_finds_the_term_that_is_wrong() -> None:
    """Attention takes three times what the start measured; all else is right."""
    times, truth = StepTimes(MEASURED), StepTimes(replace(MEASURED, pair=3 * MEASURED.pair))
    loads = [StepLoad(rows, rows * start, 1) for rows, start in ((1, 100), (64, 0), (64, 6000), (200, 1000))]
    for _ in range(100):
        for load in loads:
            times.took(load, truth.seconds(load))
    for load in loads:
        assert times.seconds(load) == pytest.approx(truth.seconds(load), rel=0.15)


@pytest.mark.parametrize("seconds", [60.0, 1e-6])
def test_a_pause_of_the_machine_changes_little(seconds: float) -> None:
    times, load = StepTimes(MEASURED), StepLoad(64, 1e5, 4)
    before = times.seconds(load)
    times.took(load, seconds)
    assert times.seconds(load) == pytest.approx(before, rel=0.06)


def test_no_term_falls_below_its_floor() -> None:
    times, load = StepTimes(MEASURED), StepLoad(64, 1e5, 4, 64 * 8, 60)
    before = times.seconds(load)
    for _ in range(2000):
        times.took(load, 1e-9)
    least = times.seconds(load)
    assert before / 2 <= least < 0.505 * before
    times.took(load, 0.0)
    times.took(StepLoad(), 1.0)
    assert times.seconds(load) == least, "neither tells anything"
    nothing = StepTimes(replace(MEASURED, pair=0.0, sample=0.0, score=0.0))
    for more in (
        StepLoad(1, pairs=1000),
        StepLoad(1, sampled=1),
        StepLoad(1, ranks=8),
        StepLoad(1, scored=1),
    ):
        assert nothing.seconds(more) > nothing.seconds(StepLoad(1))
