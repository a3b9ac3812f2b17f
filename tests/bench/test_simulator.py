"""A simulated step with adapters beside the steps that an H200 took."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.gpu.decoding.simulator import (
    APART_ERROR,
    APART_MS,
    CELLS,
    ERROR,
    LAYERS,
    PARTS,
    PARTS_ERROR,
    Cell,
    Fit,
    Planned,
    apart_form,
    by_parts,
    by_rows_form,
    floors,
    launch_us,
    measured_form,
    refined,
    tables,
)


def name(cell: Cell) -> str:
    return f"{cell.rows} of {cell.adapters}, rank {cell.rank}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_measured_steps_are_reproduced_within_the_error_that_is_stated(cell: Cell) -> None:
    assert sum(measured_form(cell, Fit()).values()) == pytest.approx(cell.layer_us, rel=ERROR)


@pytest.mark.parametrize("adapters", PARTS)
def test_measured_parts_are_reproduced_within_the_error_that_is_stated(adapters: int) -> None:
    cell = next(cell for cell in CELLS if (cell.rows, cell.adapters, cell.rank) == (64, adapters, 16))
    simulated = measured_form(cell, Fit())
    for part, measured in by_parts(adapters).items():
        assert simulated[part] == pytest.approx(measured, rel=PARTS_ERROR), part


def test_steps_with_b_sides_of_their_own_are_reproduced_within_the_error_that_is_stated() -> None:
    found = {
        (cell.rows, cell.adapters): cell.base_ms + sum(apart_form(cell, Fit()).values()) * LAYERS / 1e3
        for cell in CELLS
        if cell.rank == 16
    }
    assert {key: found[key] for key in APART_MS} == pytest.approx(APART_MS, rel=APART_ERROR)


def test_no_form_is_faster_than_its_bytes() -> None:
    for cell in CELLS:
        floor = sum(floors(cell).values())
        assert sum(apart_form(cell, Fit()).values()) > floor
        assert sum(by_rows_form(cell, Fit(), Planned()).values()) > floor
    (of_64,) = (cell for cell in CELLS if (cell.rows, cell.adapters, cell.rank) == (64, 64, 16))
    assert sum(floors(of_64).values()) == pytest.approx(39.7, abs=0.1)


def test_a_launch_takes_whole_rounds_or_its_bytes() -> None:
    rounds = [launch_us(1.0, 2.0, items, 10, 0, 1.0) for items in (1, 10, 11, 20, 21)]
    assert rounds == [3.0, 3.0, 5.0, 5.0, 7.0]
    assert launch_us(1.0, 2.0, 1, 10, 4.23e6 * 8, 0.8) == pytest.approx(11.0)


def test_constants_that_are_wrong_are_fitted_again() -> None:
    wrong = replace(Fit(), many_rows=2 * Fit().many_rows)
    (of_8,) = (cell for cell in CELLS if (cell.rows, cell.adapters, cell.rank) == (64, 8, 16))
    assert sum(measured_form(of_8, wrong).values()) > (1 + ERROR) * of_8.layer_us
    fitted = refined(wrong)
    for cell in CELLS:
        assert sum(measured_form(cell, fitted).values()) == pytest.approx(cell.layer_us, rel=ERROR)


def test_the_tables_say_what_is_predicted() -> None:
    printed = tables(Fit(), Planned())
    assert printed.count("| 64 | 64 | 16 |") == 3
    assert "PREDICTED, not measured" in printed
