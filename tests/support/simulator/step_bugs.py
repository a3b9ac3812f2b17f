"""Bugs to plant into what carries a step through: aborts, faults, lack of memory, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from loraplex.engine.core import request_tracker
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.core.in_flight import InFlightSteps
from loraplex.engine.core.request_tracker import RequestTracker
from loraplex.engine.core.timers import SequenceTimers
from loraplex.engine.core.waits import Waits
from loraplex.engine.execution.step_results import RowResult, StepResult
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.scheduling.step_budget import StepBudget
from loraplex.engine.types import ScheduledSequence, Sequence, SequenceState, StepPlan
from support.engine.fake_runner import FakeRunner


def no_lease_for_the_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    submit = InFlightSteps.submit

    def careless(self: InFlightSteps, plan: StepPlan) -> bool:
        submitted = submit(self, plan)
        if submitted:
            for lease in self._in_flight[-1].leases:
                self._cache.release(lease)
            self._in_flight[-1].leases.clear()
        return submitted

    patch.setattr(InFlightSteps, "submit", careless)


def abort_lost_while_running(patch: pytest.MonkeyPatch) -> None:
    abort = EngineCore.abort

    def lose(self: EngineCore, request_id: str) -> None:
        seq = self._tracker.live.get(request_id)
        if seq is not None and seq.state is not SequenceState.RUNNING:
            abort(self, request_id)

    patch.setattr(EngineCore, "abort", lose)


def pending_token_fed_as_a_placeholder(patch: pytest.MonkeyPatch) -> None:
    submit = InFlightSteps.submit

    def wrong(self: InFlightSteps, plan: StepPlan) -> bool:
        rows = tuple(replace(row, pending_input=False) for row in plan.scheduled)
        return submit(self, replace(plan, scheduled=rows))

    patch.setattr(InFlightSteps, "submit", wrong)


def deadline_ignored_while_running(patch: pytest.MonkeyPatch) -> None:
    error = RequestTracker.error

    def ignore(self: RequestTracker, seq: Sequence, code: Any, message: str, *, spoilt: bool = False) -> None:
        if code != "deadline_exceeded" or seq.state is not SequenceState.RUNNING:
            error(self, seq, code, message, spoilt=spoilt)

    patch.setattr(RequestTracker, "error", ignore)


def failed_step_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlightSteps, "_fail", lambda self, flight, error, void=(): self._release_leases(flight))


def spoilt_kv_still_found(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish
    patch.setattr(Scheduler, "finish", lambda self, seq, *, spoilt=False: finish(self, seq))


def failed_row_registered_as_a_prefix(patch: pytest.MonkeyPatch) -> None:
    take = RequestTracker.take_row

    def register(
        self: RequestTracker, seq: Sequence, scheduled: ScheduledSequence, *rest: Any, **options: Any
    ) -> None:
        self._scheduler.computed(seq, scheduled)
        take(self, seq, scheduled, *rest, **options)

    patch.setattr(RequestTracker, "take_row", register)
    spoilt_kv_still_found(patch)


def blocks_leaked_by_a_failed_row(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish

    def leak(self: Scheduler, seq: Sequence, *, spoilt: bool = False) -> None:
        if spoilt:
            seq.block_ids = ()
        finish(self, seq, spoilt=spoilt)

    patch.setattr(Scheduler, "finish", leak)


def tokens_lost_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def lose(self: Scheduler, rows: Iterable[tuple[Sequence, ScheduledSequence]]) -> None:
        chosen = list(rows)
        for seq in {seq for seq, _ in chosen}:
            if seq.num_outputs:
                del seq.token_ids[-1]
        roll_back(self, chosen)

    patch.setattr(Scheduler, "roll_back", lose)


def token_of_a_lost_step_still_expected(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def expect(self: Scheduler, rows: Iterable[tuple[Sequence, ScheduledSequence]]) -> None:
        chosen = list(rows)
        pending = {seq: seq.num_pending for seq, _ in chosen}
        roll_back(self, chosen)
        for seq, count in pending.items():
            seq.num_pending = count

    patch.setattr(Scheduler, "roll_back", expect)


def lost_step_taken_for_computed(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def skip(self: Scheduler, rows: Iterable[tuple[Sequence, ScheduledSequence]]) -> None:
        roll_back(self, [(seq, row) for seq, row in rows if row.samples])

    patch.setattr(Scheduler, "roll_back", skip)


def step_behind_a_lost_one_believed(patch: pytest.MonkeyPatch) -> None:
    collect = InFlightSteps._collect_results
    patch.setattr(InFlightSteps, "_collect_results", lambda self, step, void: collect(self, step, ()))


def leases_of_a_lost_step_kept(patch: pytest.MonkeyPatch) -> None:
    start_over = InFlightSteps._start_over

    def keep(self: InFlightSteps, flight: Any, error: Any) -> None:
        leases, flight.leases = flight.leases, []
        start_over(self, flight, error)
        flight.leases = leases

    patch.setattr(InFlightSteps, "_start_over", keep)


def lack_of_memory_ends_all_requests_of_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlightSteps, "_start_over", InFlightSteps._fail)


def lack_of_memory_ends_a_request_at_once(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepBudget.ran_out
    patch.setattr(StepBudget, "ran_out", lambda self, *step: ran_out(self, *step) and False)


def request_that_never_fits_retried_forever(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepBudget.ran_out

    def hope(self: StepBudget, num_tokens: int, start: int, seq: Sequence | None, now: float) -> bool:
        if num_tokens == 1 and seq is not None:
            seq.num_starved = 0
        return ran_out(self, num_tokens, start, seq, now)

    patch.setattr(StepBudget, "ran_out", hope)


def steps_as_large_as_before_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepBudget.ran_out

    def forget(self: StepBudget, *step: Any) -> bool:
        goes_on = ran_out(self, *step)
        self.limit = self._most
        return goes_on

    patch.setattr(StepBudget, "ran_out", forget)


def aborted_prompt_still_scored(patch: pytest.MonkeyPatch) -> None:
    abort = EngineCore.abort

    def later(self: EngineCore, request_id: str) -> None:
        seq = self._tracker.live.get(request_id)
        if seq is None or not 0 < seq.num_scored < seq.num_to_score:
            abort(self, request_id)

    patch.setattr(EngineCore, "abort", later)


def scores_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    collect = FakeRunner.collect

    def swap(self: FakeRunner, handle: object) -> StepResult:
        result = collect(self, handle)
        alike: dict[object, list[int]] = {}
        told = {index: row.scores for index, row in enumerate(result.rows) if row.scores is not None}
        for index, scores in told.items():
            size = [(len(part), part.num_top) for part in (scores.output, scores.prompt) if part is not None]
            alike.setdefault(tuple(size), []).append(index)
        for indices in alike.values():
            for index, other in zip(indices, reversed(indices), strict=True):
                result.rows[index].scores = told[other]
        return result

    patch.setattr(FakeRunner, "collect", swap)


def scores_of_an_event_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(request_tracker, "cut_scores", lambda scores, start, end: None)


def matcher_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add_sequence
    patch.setattr(Scheduler, "add_sequence", lambda self, seq, *, hold=False: add(self, seq))
    patch.setattr(Scheduler, "release", lambda self, seq, now: None)


def matcher_waited_for_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "take_ended", lambda self: [])


def slow_load_waited_for(patch: pytest.MonkeyPatch) -> None:
    add = EngineCore.add_request
    patch.setattr(EngineCore, "add_request", lambda self, request: add(self, replace(request, max_load=None)))


def slow_load_noticed_on_arrival_alone(patch: pytest.MonkeyPatch) -> None:
    take_due = SequenceTimers.take_due

    def miss(self: SequenceTimers, now: float, num_live: int) -> list[Sequence]:
        due = take_due(self, now, num_live)
        return [seq for seq in due if seq.request.max_load is None or seq.deadline_at is not None]

    patch.setattr(SequenceTimers, "take_due", miss)


def matcher_kept_behind_its_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Waits, "close_request", lambda self, request_id: None)


def end_of_a_grammar_missed(patch: pytest.MonkeyPatch) -> None:
    take = RequestTracker.take_row

    def miss(
        self: RequestTracker, seq: Sequence, scheduled: ScheduledSequence, row: RowResult, now: float
    ) -> None:
        take(self, seq, scheduled, msgspec.structs.replace(row, ended=False), now)

    patch.setattr(RequestTracker, "take_row", miss)


def resumed_answer_begun_again(patch: pytest.MonkeyPatch) -> None:
    add = EngineCore.add_request
    patch.setattr(EngineCore, "add_request", lambda self, request: add(self, replace(request, generated=())))


def prompt_of_a_resumed_answer_scored_again(patch: pytest.MonkeyPatch) -> None:
    def all_but_the_last(seq: Sequence) -> int:
        return 0 if seq.request.sampling.prompt_logprobs is None else seq.num_prompt - 1

    patch.setattr(Sequence, "num_to_score", property(all_but_the_last))


STEP_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    no_lease_for_the_step_in_flight,
    abort_lost_while_running,
    pending_token_fed_as_a_placeholder,
    deadline_ignored_while_running,
    failed_step_forgotten,
    spoilt_kv_still_found,
    failed_row_registered_as_a_prefix,
    blocks_leaked_by_a_failed_row,
    tokens_lost_when_memory_runs_out,
    token_of_a_lost_step_still_expected,
    lost_step_taken_for_computed,
    step_behind_a_lost_one_believed,
    leases_of_a_lost_step_kept,
    lack_of_memory_ends_all_requests_of_a_step,
    lack_of_memory_ends_a_request_at_once,
    request_that_never_fits_retried_forever,
    steps_as_large_as_before_when_memory_runs_out,
    aborted_prompt_still_scored,
    scores_of_the_neighbour,
    scores_of_an_event_lost,
    matcher_not_waited_for,
    matcher_waited_for_without_end,
    slow_load_waited_for,
    slow_load_noticed_on_arrival_alone,
    matcher_kept_behind_its_request,
    end_of_a_grammar_missed,
    resumed_answer_begun_again,
    prompt_of_a_resumed_answer_scored_again,
)
