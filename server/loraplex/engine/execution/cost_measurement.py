"""Measurement of what a decoding step takes by its number of rows, on the runner that will run the steps."""

from __future__ import annotations

import time
from collections.abc import Callable

from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.scheduling.step_costs import MEASURED_ROWS, NotMeasured, StepCosts
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

_CONTEXT = 496
"""Positions before the rows of a measured step, where a sequence may be that long."""
_ROUNDS = 3
_MAX_S = 0.8
"""Seconds after which no further step is begun."""
_NEEDED = 3
"""Sizes, the first of MEASURED_ROWS, that are measured once however long they take."""


def measure_step_costs(
    runner: ModelRunner, limits: StepLimits, *, clock: Callable[[], float] = time.perf_counter
) -> StepCosts:
    """The costs of steps that verify a draft: all rows are of one sequence, and each is sampled. `limits` are those of
    any step: larger sizes are not measured.

    The sizes take turns, so that a moment in which the machine is busy meets one try of each, and the least time of a
    size counts. For the start, once kernels are compiled and before any request: the first block of the KV cache is
    written to. Raises NotMeasured, and what a step raises.
    """
    length = BLOCK_SIZE * limits.max_blocks
    most = min(limits.max_rows, limits.max_sequences, length)
    if most < 2:
        raise NotMeasured("a step has room for one row only")
    sizes = [rows for rows in MEASURED_ROWS if rows <= most]
    steps = _Steps(runner, min(_CONTEXT, length - most), clock)
    steps.run(1)  # the first of all steps makes what later ones find
    begin = clock()
    seconds: dict[int, float] = {}
    for turn in range(_ROUNDS):
        for place, rows in enumerate(sizes):
            needed = turn == 0 and place < _NEEDED
            if needed or clock() - begin + _expected(seconds, rows) <= _MAX_S:
                seconds[rows] = min(steps.run(rows), seconds.get(rows, float("inf")))
    return StepCosts.from_seconds(seconds)


def _expected(seconds: dict[int, float], rows: int) -> float:
    """The most seconds that a step of `rows` rows should take, by the largest measured step that is not larger."""
    known = max(size for size in seconds if size <= rows)
    return seconds[known] * rows / known


class _Steps:
    """Steps of one sequence of made-up tokens behind `start` positions."""

    def __init__(self, runner: ModelRunner, start: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._start = start
        self._request = EngineRequest(
            "measured", "", (0,) * (start + 1), SamplingParams(max_tokens=MEASURED_ROWS[-1])
        )

    def run(self, rows: int) -> float:
        """Seconds of a step of `rows` rows. Raises NotMeasured where no token can be sampled."""
        plan = StepPlan(0, (self._slice(rows),))
        begin = self._clock()
        result = self._runner.collect(self._runner.submit(plan))
        took = self._clock() - begin
        if result.failed:
            raise NotMeasured(result.failed[0])
        return took

    def _slice(self, rows: int) -> ScheduledSequence:
        """One token and `rows - 1` drafts behind it."""
        tokens = (0,) * rows
        return ScheduledSequence(
            request=self._request,
            order=0,
            epoch=0,
            start=self._start,
            num_tokens=rows,
            token_ids=tokens,
            # A block may stand in a table twice: what is computed does not matter.
            block_ids=(0,) * -(-(self._start + rows) // BLOCK_SIZE),
            slot=-1,
            samples=True,
            pending_input=False,
            output_index=0,
            drafted=tokens[1:],
        )
