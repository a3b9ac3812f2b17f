"""Steps from submission to result: the leases that they hold, and the handling of failed steps. No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease
from loraplex.engine.core.expert_counts import ExpertCounts
from loraplex.engine.core.request_tracker import RequestTracker
from loraplex.engine.core.stats import StepTokens
from loraplex.engine.execution.device_errors import DeviceLost, DeviceOutOfMemory
from loraplex.engine.execution.step_results import StepResult
from loraplex.engine.heartbeat import StepHeartbeat
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.step_budget import StepBudget
from loraplex.engine.types import StepPlan

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes steps, in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> object:
        """Begin a step; returns a handle to collect it by. At most `lookahead` + 1 steps are in flight. Raises as
        `collect` does; then the step is not in flight."""
        ...

    def collect(self, handle: object) -> StepResult:
        """Wait for the oldest step in flight. Raises DeviceOutOfMemory: then it is computed again in smaller steps.
        Raises DeviceLost: then the engine ends. Raises anything else: then all requests of the step end with an
        error."""
        ...


@dataclass(slots=True)
class InFlightStep:
    """A submitted step, and its leases on the adapters that it reads: their pages stay until it is collected,
    whatever becomes of its sequences. `submitted`: when, by the engine's clock."""

    plan: StepPlan
    handle: object
    leases: list[Lease]
    submitted: float = 0.0

    @property
    def orders(self) -> set[int]:
        """The orders of its sequences."""
        return {part.order for part in self.plan.parts}


class InFlightSteps:
    """The steps in flight, oldest first.

    Each holds a lease on every adapter that it reads, and releases it when it is collected, computed or failed. Results
    go to the `tracker`. A step that raises ends its own requests and no others; one that does not fit into device
    memory is computed again. `num_steps` counts the submissions since the start.
    """

    def __init__(
        self,
        runner: Runner,
        cache: AdapterCache[Any],
        scheduler: Scheduler,
        tracker: RequestTracker,
        step_budget: StepBudget,
        heartbeat: StepHeartbeat,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._scheduler = scheduler
        self._tracker = tracker
        self._step_budget = step_budget
        self._heartbeat = heartbeat
        self._clock = clock
        self._in_flight: deque[InFlightStep] = deque()
        self._collected = clock()  # the last one
        self.num_steps = 0
        self.step_tokens = StepTokens()
        self.experts = ExpertCounts()

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def leases(self) -> list[Lease]:
        return [lease for step in self._in_flight for lease in step.leases]

    def submit(self, plan: StepPlan) -> bool:
        """Begin a step that has something to compute or to copy. False if it was not submitted: its requests have ended
        then, or are planned again. Raises DeviceLost."""
        adapters: dict[str, bool] = {}  # by digest, whether a request that is not background reads it
        for part in plan.parts:
            if (ref := part.request.adapter) is not None:
                adapters[ref.digest] = adapters.get(ref.digest, False) or not part.request.background
        leases = [self._cache.acquire(digest, counts=adapters[digest]) for digest in sorted(adapters)]
        self.num_steps += 1
        submitted = self._clock()
        try:
            handle = self._runner.submit(plan)
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            while self._in_flight:  # they were submitted before it
                self.collect()
            self._start_over(InFlightStep(plan, None, leases), error)
            return False
        except Exception as error:
            self._fail(InFlightStep(plan, None, leases), error)
            return False
        self._in_flight.append(InFlightStep(plan, handle, leases, submitted))
        self._heartbeat.step_submitted(plan.num_tokens)
        return True

    def copy(self) -> None:
        """Have the copies that wait for a plan done now, behind all that is in flight. Raises DeviceLost."""
        while self._in_flight:
            self.collect()
        copies = self._scheduler.blocks.take_copies()
        if copies and self.submit(StepPlan(next(self._scheduler.step_ids), (), copies=copies)):
            self.collect()

    def collect(self) -> None:
        """Wait for the oldest step (there must be one) and take its results. Raises DeviceLost."""
        step = self._in_flight.popleft()
        error = self._collect_results(step, frozenset())
        if error is not None:
            self._start_over(step, error)

    def _collect_results(self, step: InFlightStep, void: Collection[int]) -> DeviceOutOfMemory | None:
        """Wait for a step and take its results, except those of sequences whose order is in `void`: they depend on an
        earlier step that was not computed. Returns the error if the step did not fit into memory; its leases are kept
        then."""
        try:
            result = self._runner.collect(step.handle)
            if result.step_id != step.plan.step_id or len(result.rows) != len(step.plan.scheduled):
                raise RuntimeError(f"the result of step {step.plan.step_id} belongs to another step")
        except DeviceLost:
            raise
        except DeviceOutOfMemory as error:
            self._heartbeat.step_collected(computed=False)
            return error
        except Exception as error:
            self._heartbeat.step_collected(computed=False)
            self._fail(step, error, void)
            return None
        self._heartbeat.step_collected(computed=True)
        if step.plan.parts:
            self._step_budget.computed()
        self.step_tokens.computed(step.plan, result.rows)
        self.experts.computed(result.experts)
        now = self._clock()
        self._scheduler.took(step.plan, now - max(step.submitted, self._collected))
        self._collected = now
        tracker = self._tracker
        for scheduled, row in zip(step.plan.scheduled, result.rows, strict=True):
            # One that ended meanwhile (aborted, or at an eos that the step before drew) wants nothing any more.
            seq = None if scheduled.order in void else tracker.sequence(scheduled)
            if seq is not None:
                tracker.take_row(seq, scheduled, row, now)
        if (part := step.plan.measure) is not None and part.order not in void:
            seq = tracker.sequence(part)
            if seq is not None:
                tracker.take_measured(seq, part, result.measured)
        self._release_leases(step)
        return None

    def _start_over(self, step: InFlightStep, error: DeviceOutOfMemory) -> None:
        """A step did not fit into the device's memory. Its work is computed again in smaller steps, for which the
        scheduler preempts sequences if there are too many: no token is lost, and none changes. A request that does
        not fit even alone and token by token ends."""
        if not step.plan.parts:
            return  # its copies were done
        parts, void = list(step.plan.parts), step.orders
        self._release_leases(step)
        while self._in_flight:
            later = self._in_flight.popleft()
            fits = self._collect_results(later, void) is None
            parts += [part for part in later.plan.parts if not fits or part.order in void]
            if not fits:
                void |= later.orders
                self._release_leases(later)
        self._scheduler.roll_back(
            (seq, part) for part in parts if (seq := self._tracker.sequence(part)) is not None
        )
        first = step.plan.parts[0]
        goes_on = self._step_budget.ran_out(
            step.plan.num_tokens, first.start, self._tracker.sequence(first), self._clock()
        )
        limit = self._step_budget.limit
        _log.warning(
            "a step of %d tokens: %s; the limit is %d tokens a step now", step.plan.num_tokens, error, limit
        )
        if not goes_on:
            for part in step.plan.parts:
                if (seq := self._tracker.sequence(part)) is not None:
                    self._tracker.error(
                        seq, "server_overloaded", "the device has too little memory for this request now"
                    )

    def _fail(self, step: InFlightStep, error: Exception, void: Collection[int] = ()) -> None:
        """End every request of a step that raised. The step registered no blocks, so its writes cannot be found in the
        prefix cache; later steps overwrite them before they read."""
        _log.error("step %d failed", step.plan.step_id, exc_info=error)
        for part in step.plan.parts:
            seq = self._tracker.sequence(part)
            if seq is not None and part.order not in void:
                self._tracker.error(seq, "internal_error", "the step that computed this request failed")
        self._release_leases(step)

    def _release_leases(self, step: InFlightStep) -> None:
        for lease in step.leases:
            self._cache.release(lease)
