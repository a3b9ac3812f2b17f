"""Measurement of what steps take, on the runner that will run them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from loraplex.engine.execution.executor import Executor
from loraplex.engine.execution.inputs import StepLimits
from loraplex.engine.execution.runner import ModelRunner
from loraplex.engine.execution.warm_up import made_up_slice
from loraplex.engine.scheduling.timing.step_costs import FEW_ROWS, MANY_ROWS, NotMeasured, StepCosts
from loraplex.engine.scheduling.timing.step_times import MeasuredTimes
from loraplex.engine.types import SamplingParams, ScheduledSequence, StepPlan
from loraplex.kernels.attention import BLOCK_SIZE

_CONTEXT = 496
"""Positions before the rows of a measured step, where a sequence may be that long."""
_TRIES = (*FEW_ROWS, *FEW_ROWS, *MANY_ROWS, *FEW_ROWS, *MANY_ROWS)
"""Rows of the steps that are run, in this order. Each size comes again later, so that a moment in which the machine is
busy meets one try of it."""
_MAX_S = 0.8
"""Seconds that they may take."""
_NEEDED = 3
"""The first tries, which are run however long they take."""
_PROMPT_ROWS = (16, 32, 64, 128, 256)
"""Rows of the steps of a prompt that are run."""
_KIND_TRIES = 3
_LONG_CONTEXT = 4096
_LONG_ROWS = 32
"""How often a step is run that shows what attention or scores take, the positions before it, and its rows: about as
many as a step bounded by time has there."""


def measure_step_times(runner: ModelRunner, limits: StepLimits, worked: Callable[[], float]) -> MeasuredTimes:
    """Measure what steps take: by their rows, where all are of one sequence and each is sampled, as in the
    verification of a draft; by the context behind them; and by the positions that are scored. `limits` are those of any
    step: larger sizes are not measured. `worked`: seconds of processor time so far of what runs the steps, on one
    processor; other programs hardly lengthen it. Or seconds of another clock.

    The least time of a size counts. For the start, once kernels are compiled and before any request: the first block of
    the KV cache is written to. Raises NotMeasured, and what a step raises.
    """
    length = BLOCK_SIZE * limits.max_blocks
    most = min(limits.max_rows, limits.max_sequences, length)
    if most < 2:
        raise NotMeasured("a step has room for one row only")
    steps = _Steps(runner, worked)
    start = min(_CONTEXT, length - min(most, MANY_ROWS[-1]))
    steps.run(1, start)  # the first of all steps makes what later ones find
    seconds: dict[int, float] = {}
    for number, rows in enumerate(rows for rows in _TRIES if rows <= most):
        if number < _NEEDED or steps.spent + _expected(seconds, rows) <= _MAX_S:
            seconds[rows] = min(steps.run(rows, start), seconds.get(rows, inf))
    costs = StepCosts.from_seconds(seconds)
    return _prompt_times(steps, costs, seconds, start, length, min(limits.max_rows, length - 1))


def _prompt_times(
    steps: _Steps, costs: StepCosts, decoding: Mapping[int, float], start: int, length: int, most: int
) -> MeasuredTimes:
    """The times of steps of up to `most` rows of prompts of up to `length` positions. `decoding`: those of steps by
    their rows, where each is sampled and has `start` positions before it. What takes too long is taken for none: steps
    correct that."""
    steps.spent = 0.0
    plain = {1: decoding[1]}
    for rows in (*_PROMPT_ROWS, *_PROMPT_ROWS[:-1]):
        if rows <= most and steps.spent + plain[max(plain)] * rows / max(plain) <= _MAX_S:
            plain[rows] = min(steps.run_prompt(rows, 0), plain.get(rows, inf))
    if len(plain) == 1:
        plain = dict(decoding)  # a prompt's rows take no more: few are sampled
    rows = max(rows for rows in plain if rows <= _LONG_ROWS)
    far = min(_LONG_CONTEXT, length - rows)
    pair = sample = score = 0.0
    if rows > 1 and far > start and steps.spent + 6 * plain[rows] <= 2 * _MAX_S:
        # The first of a kind takes longer.
        longer, behind, scored = (
            min(run() for _ in range(_KIND_TRIES))
            for run in (
                partial(steps.run_prompt, rows, far),
                partial(steps.run_prompt, rows, start),
                partial(steps.run_prompt, rows, 0, scored=rows),
            )
        )
        pair = max(0.0, longer - behind) / (rows * (far - start))
        score = max(0.0, scored - plain[rows]) / rows
    known = max(rows for rows in decoding if rows in plain)
    if known > 1:
        sample = max(0.0, decoding[known] - plain[known] - pair * known * start) / known
    return MeasuredTimes(plain, pair, sample, score, costs)


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
    """Steps of one sequence of made-up tokens, and the seconds `spent` on them."""

    def __init__(self, runner: ModelRunner, worked: Callable[[], float]) -> None:
        self._runner = runner
        self._worked = worked
        self.spent = 0.0

    def run(self, rows: int, start: int) -> float:
        """The seconds of a step of one token behind `start` others, and `rows - 1` drafts behind it. Raises NotMeasured
        where no token can be sampled."""
        asked = SamplingParams(max_tokens=MANY_ROWS[-1])
        return self._time(self._slice(rows, asked, start=start, drafted=rows - 1))

    def run_prompt(self, rows: int, start: int, scored: int = 0) -> float:
        """The seconds of a step of `rows` positions of a prompt behind `start` others, `scored` of them scored."""
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        return self._time(self._slice(rows, asked, start=start, samples=False, num_scored=scored))

    def _slice(self, rows: int, asked: SamplingParams, **options: Any) -> ScheduledSequence:
        # Routers send equal tokens to the same experts: rows of one token would cost a mixture next to nothing.
        return made_up_slice(self._runner, rows, asked, vocab_size=self._runner.vocab_size, **options)

    def _time(self, part: ScheduledSequence) -> float:
        before = self._worked()
        result = self._runner.collect(self._runner.submit(StepPlan(0, (part,))))
        if (failed := result.rows[0].failed) is not None:
            raise NotMeasured(failed.reason)
        took = self._worked() - before
        self.spent += took
        return took
