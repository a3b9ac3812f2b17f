"""The table of relative costs that measured steps become."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.scheduling.timing.step_costs import (
    FEW_ROWS,
    MANY_ROWS,
    MOST_ROWS,
    NotMeasured,
    StepCosts,
)

TIMES = {1: 0.010, 2: 0.012, 4: 0.013, 8: 0.021, 16: 0.036, 32: 0.066, 64: 0.130}


def test_costs_are_multiples_of_one_row_on_lines_between_measured_sizes() -> None:
    costs = StepCosts.from_seconds(TIMES)
    assert costs.cost(1) == 1.0
    for rows, took in TIMES.items():
        assert costs.cost(rows) == pytest.approx(took / 0.010)
    assert costs.cost(3) == pytest.approx(1.25)
    assert costs.cost(6) == pytest.approx(1.7)


def test_the_edge_of_a_tile_shows() -> None:
    costs = StepCosts.from_seconds({1: 1.0, 2: 1.2, 3: 1.28, 4: 1.29, 5: 1.71, 8: 2.1, 9: 2.19})
    assert costs.cost(4) - costs.cost(3) < 0.02 < 0.4 < costs.cost(5) - costs.cost(4)


def test_sizes_above_the_largest_measured_one_cost_as_rows_did_on_average() -> None:
    costs = StepCosts.from_seconds({1: 1.0, 4: 1.3, 8: 2.4, 9: 2.41})
    assert costs.cost(17) == pytest.approx(1 + 16 * 1.41 / 8)
    whole = StepCosts.from_seconds(TIMES)
    assert whole.cost(127) == pytest.approx(1 + 126 * 12 / 63)


def test_a_time_that_a_busy_machine_made_long_is_that_of_the_next_larger_size() -> None:
    costs = StepCosts.from_seconds(TIMES | {4: 0.4})
    assert costs.cost(4) == pytest.approx(2.1)
    first = StepCosts.from_seconds(TIMES | {1: 9.0})
    assert first.cost(2) == pytest.approx(1.01), "rows look as cheap as they can, not cheaper"


def test_rows_are_neither_free_nor_dearer_than_steps_of_their_own() -> None:
    free = StepCosts.from_seconds(dict.fromkeys(FEW_ROWS + MANY_ROWS, 0.01))
    assert free.cost(MOST_ROWS) == pytest.approx(1.63)
    dear = StepCosts.from_seconds({1: 0.001, 2: 1.0, 4: 1.0, 8: 5.0})
    assert [dear.cost(rows) for rows in (1, 2, 8, 64)] == [1.0, 2.0, 8.0, 64.0]


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        ({}, "steps of no rows"),
        ({1: 0.01}, r"steps of \[1\] rows"),
        ({2: 0.01, 4: 0.02}, r"steps of \[2, 4\] rows"),
        ({1: 0.0, 4: 0.01}, "no measurable time"),
        ({1: 0.01, 4: -1.0}, "no measurable time"),
        ({1: 0.01, 4: math.nan}, "no measurable time"),
        ({1: 0.01, 4: math.inf}, "no measurable time"),
    ],
)
def test_nonsense_is_no_table(seconds: dict[int, float], message: str) -> None:
    with pytest.raises(NotMeasured, match=message):
        StepCosts.from_seconds(seconds)


@given(st.dictionaries(st.sampled_from(FEW_ROWS + MANY_ROWS), st.floats(1e-9, 1e6), min_size=1))
def test_any_times_give_costs_that_never_fall(seconds: dict[int, float]) -> None:
    costs = StepCosts.from_seconds({1: 1e-3, 2: 2e-3} | seconds)
    table = [costs.cost(rows) for rows in range(1, 130)]
    assert table[0] == 1.0
    assert table == sorted(table)
    assert all(1.0 <= cost <= rows for rows, cost in enumerate(table, 1))
