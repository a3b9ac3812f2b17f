"""Bounds of steps' times with random figures."""

from __future__ import annotations

import random

from loraplex.engine.scheduling.timing.step_bound import StepBound
from loraplex.engine.scheduling.timing.step_costs import MOST_ROWS, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes, StepTimes

_COSTS = StepCosts(tuple(1 + 0.1 * rows for rows in range(MOST_ROWS)))


def drawn_bound(rng: random.Random) -> StepBound:
    """A step takes up to some tens of positions, more or fewer behind a context, or one recorded size."""
    row = rng.choice((0.001, 0.01, 0.1))
    measured = MeasuredTimes(
        {1: row, 64: row * rng.choice((1, 5, 40))},
        pair=row * rng.choice((0.0, 1e-4, 0.02)),
        sample=row * rng.choice((0.0, 0.2)),
        score=row * rng.choice((0.0, 1.0)),
        costs=_COSTS,
        sizes=rng.choice(((), (), (2, 16, 64))),
    )
    return StepBound(StepTimes(measured), rng.choice((None, row * rng.choice((0.5, 2, 10, 50)))))
