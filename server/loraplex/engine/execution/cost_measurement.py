"""Measurement of what a decoding step takes by its number of rows, on the runner that will run the steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf

from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.scheduling.step_costs import FEW_ROWS, MANY_ROWS, NotMeasured, StepCosts
from loraplex.engine.types import EngineRequest, SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

_CONTEXT = 496
"""Positions before the rows of a measured step, where a sequence may be that long."""
_TRIES = (*FEW_ROWS, *FEW_ROWS, *MANY_ROWS, *FEW_ROWS, *MANY_ROWS)
"""Rows of the steps that are run, in this order. Each size comes again later, so that a moment in which the machine is
busy meets one try of it."""
_MAX_S = 0.8
"""Seconds of processor time that they may take."""
_NEEDED = 3
"""The first tries, which are run however long they take."""


def measure_step_costs(runner: ModelRunner, limits: StepLimits, worked: Callable[[], float]) -> StepCosts:
    """The costs of steps that verify a draft: all rows are of one sequence, and each is sampled. `limits` are those of
    any step: larger sizes are not measured. `worked`: seconds of processor time so far of what runs the steps, on one
    processor. Other programs hardly lengthen it.

    The least time of a size counts. For the start, once kernels are compiled and before any request: the first block of
    the KV cache is written to. Raises NotMeasured, and what a step raises.
    """
    length = BLOCK_SIZE * limits.max_blocks
    most = min(limits.max_rows, limits.max_sequences, length)
    if most < 2:
        raise NotMeasured("a step has room for one row only")
    steps = _Steps(runner, min(_CONTEXT, length - min(most, MANY_ROWS[-1])))
    steps.run(1)  # the first of all steps makes what later ones find
    seconds: dict[int, float] = {}
    begin = worked()
    for number, rows in enumerate(rows for rows in _TRIES if rows <= most):
        before = worked()
        if number < _NEEDED or before - begin + _expected(seconds, rows) <= _MAX_S:
            steps.run(rows)
            seconds[rows] = min(worked() - before, seconds.get(rows, inf))
    return StepCosts.from_seconds(seconds)


def time_on(executor: Executor) -> Callable[[], float]:
    """Seconds of processor time of the calling thread and the executor's worker. The worker computes an equal share of
    what threads share, so that this is the time of a step on a machine that has nothing else to do."""

    def worked() -> float:
        return time.thread_time() + executor.submit(time.thread_time).result()

    return worked


def _expected(seconds: Mapping[int, float], rows: int) -> float:
    """The most seconds that a step of `rows` rows should take, by the largest one that was run and is not larger."""
    known = max(size for size in seconds if size <= rows)
    return seconds[known] * rows / known


class _Steps:
    """Steps of one sequence of made-up tokens behind `start` positions."""

    def __init__(self, runner: ModelRunner, start: int) -> None:
        self._runner = runner
        self._start = start
        self._request = EngineRequest(
            "measured", "", (0,) * (start + 1), SamplingParams(max_tokens=MANY_ROWS[-1])
        )

    def run(self, rows: int) -> None:
        """Raises NotMeasured where no token can be sampled."""
        result = self._runner.collect(self._runner.submit(StepPlan(0, (self._slice(rows),))))
        if result.failed:
            raise NotMeasured(result.failed[0])

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
