"""A step from its submission to its answer: who computes it, what is kept of it meanwhile, and what becomes of it
where it fails. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from loraplex.adapters.cache import AdapterCache, Lease
from loraplex.engine.answers import Answers
from loraplex.engine.faults import DeviceLost, DeviceOutOfMemory
from loraplex.engine.gauges import StepTokens
from loraplex.engine.progress import Progress
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_size import StepSize
from loraplex.engine.types import Sequence, SequenceState, StepPlan, StepResult

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes steps, in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> object:
        """Begin a step; returns a handle to collect it by. At most `lookahead` + 1 steps are in flight. Raises as
        `collect` does; then nothing is in flight for it."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the oldest step in flight. Raises DeviceOutOfMemory: then it is computed anew in smaller steps.
        Raises DeviceLost: then the engine ends. Raises anything else: then all requests of the step end with an
        error."""
        ...


@dataclass(slots=True)
class Flight:
    """A submitted step, and its leases on the adapters that it reads: their pages stay until it is collected,
    whatever becomes of its sequences."""

    plan: StepPlan
    handle: object
    leases: list[Lease]

    @property
    def sequences(self) -> list[Sequence]:
        return [row.seq for row in self.plan.scheduled]


class Flights:
    """The steps in flight, oldest first.

    Each holds a lease on every adapter that it reads, and gives it back when it lands, however it went. What it
    brings goes to the `answers`; a step that raises ends its own requests and no others, and one that does not fit
    into the device's memory is computed anew. `num_steps` counts the submissions since the start.
    """

    def __init__(
        self,
        runner: Runner,
        cache: AdapterCache[Any],
        scheduler: Scheduler,
        answers: Answers,
        step_size: StepSize,
        progress: Progress,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._answers = answers
        self._step_size = step_size
        self._progress = progress
        self._clock = clock
        self._in_flight: deque[Flight] = deque()
        self.num_steps = 0
        self.step_tokens = StepTokens()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def leases(self) -> list[Lease]:
        return [lease for flight in self._in_flight for lease in flight.leases]

    def submit(self, plan: StepPlan) -> bool:
        """Begin a step that has something to compute. False if it never took off: its requests have ended then, or are
        planned anew. Raises DeviceLost."""
        adapters = {s.seq.request.adapter.digest for s in plan.scheduled if s.seq.request.adapter is not None}
        leases = [self._cache.acquire(digest) for digest in sorted(adapters)]
        self.num_steps += 1
        try:
            handle = self._runner.submit(plan)
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            while self._in_flight:  # they went before
                self.collect()
            self._start_over(Flight(plan, None, leases), error)
            return False
        except Exception as error:
            self._fail(Flight(plan, None, leases), error)
            return False
        self._in_flight.append(Flight(plan, handle, leases))
        self._progress.begin(plan.num_tokens)
        return True

    def collect(self) -> None:
        """Wait for the oldest step, of which there must be one, and take what it brings. Raises DeviceLost."""
        flight = self._in_flight.popleft()
        error = self._take(flight, frozenset())
        if error is not None:
            self._start_over(flight, error)

    def _take(self, flight: Flight, void: Collection[Sequence]) -> DeviceOutOfMemory | None:
        """Wait for a step, and take what it brings but for the `void` sequences: a step before this one has not
        computed what it builds on. Returns what was raised if it did not fit into memory; its leases are kept then."""
        try:
            result = self._runner.collect(flight.handle)
            if result.step_id != flight.plan.step_id or len(result.token_ids) != len(flight.plan.scheduled):
                raise RuntimeError(f"the answer to step {flight.plan.step_id} is one to another step")
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            self._progress.end(computed=False)
            return error
        except Exception as error:
            self._progress.end(computed=False)
            self._fail(flight, error, void)
            return None
        self._progress.end(computed=True)
        self._step_size.computed()
        self.step_tokens.computed(flight.plan, result)
        now = self._clock()
        answers = self._answers
        for index, (scheduled, token_ids) in enumerate(
            zip(flight.plan.scheduled, result.token_ids, strict=True)
        ):
            if scheduled.seq not in void:
                scores = result.scores.get(index)
                if index in result.not_finite and scheduled.seq.request.adapter is not None:
                    answers.blame_adapter(scheduled.seq)
                else:
                    answers.take_row(scheduled, token_ids, scores, result.failed.get(index), now)
        self._land(flight)
        return None

    def _start_over(self, flight: Flight, error: DeviceOutOfMemory) -> None:
        """A step did not fit into the device's memory. What it was to compute is computed anew in smaller steps, for
        which the scheduler preempts those that are too many: no token is lost, and none changes. A request that does
        not fit even alone and token by token ends."""
        rows, void = list(flight.plan.scheduled), set(flight.sequences)
        self._land(flight)
        while self._in_flight:
            later = self._in_flight.popleft()
            fits = self._take(later, void) is None
            rows += [row for row in later.plan.scheduled if not fits or row.seq in void]
            if not fits:
                void.update(later.sequences)
                self._land(later)
        self._scheduler.roll_back(rows)
        goes_on = self._step_size.ran_out(flight.plan, self._clock())
        limit = self._step_size.limit
        _log.warning(
            "a step of %d tokens: %s; steps are of %d at most now", flight.plan.num_tokens, error, limit
        )
        if not goes_on:
            for row in flight.plan.scheduled:
                if row.seq.state is not SequenceState.FINISHED:
                    self._answers.error(
                        row.seq, "server_overloaded", "the device has too little memory for this request now"
                    )

    def _fail(self, flight: Flight, error: Exception, void: Collection[Sequence] = ()) -> None:
        """Every request of a step that raised ends here. Nothing of the step was registered, so what it may have
        left in the blocks can't be found; later steps overwrite it before they read."""
        _log.error("step %d failed", flight.plan.step_id, exc_info=error)
        for scheduled in flight.plan.scheduled:
            if scheduled.seq.state is not SequenceState.FINISHED and scheduled.seq not in void:
                self._answers.error(
                    scheduled.seq, "internal_error", "the step that computed this request failed"
                )
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        for lease in flight.leases:
            self._cache.release(lease)
