"""The simulator is only worth what it catches: each of these bugs must be caught by it, within few histories."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from loraplex.engine import adapter_scheduling, answers, prefix, scheduler
from loraplex.engine.answers import Answers
from loraplex.engine.blocks import BlockManager
from loraplex.engine.core import EngineCore
from loraplex.engine.fairness import FairQueue
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.step_size import StepSize
from loraplex.engine.steps import Flights
from loraplex.engine.types import ScheduledSequence, Sequence, SequenceState, StepPlan, StepResult
from support.fake_runner import FakeRunner
from support.simulator import Violation, play

MAX_HISTORIES = 400

Plant = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__] = plant
    return plant


@bug
def lease_released_twice(patch: pytest.MonkeyPatch) -> None:
    stop = Scheduler._stop

    def twice(self: Scheduler, seq: Sequence) -> None:
        lease = self.running[seq]
        stop(self, seq)
        if lease is not None:
            self._cache.release(lease)

    patch.setattr(Scheduler, "_stop", twice)


@bug
def lease_kept_by_a_preempted_sequence(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, draft: Any, seq: Sequence) -> None:
        if self.running[seq] is not None:
            self.running[seq] = None
        preempt(self, draft, seq)

    patch.setattr(Scheduler, "_preempt", keep)


@bug
def no_lease_for_the_step_in_flight(patch: pytest.MonkeyPatch) -> None:
    submit = Flights.submit

    def careless(self: Flights, plan: StepPlan) -> bool:
        submitted = submit(self, plan)
        if submitted:
            for lease in self._in_flight[-1].leases:
                self._cache.release(lease)
            self._in_flight[-1].leases.clear()
        return submitted

    patch.setattr(Flights, "submit", careless)


@bug
def abort_lost_while_running(patch: pytest.MonkeyPatch) -> None:
    abort = EngineCore.abort

    def lose(self: EngineCore, request_id: str) -> None:
        seq = self._answers.live.get(request_id)
        if seq is not None and seq.state is not SequenceState.RUNNING:
            abort(self, request_id)

    patch.setattr(EngineCore, "abort", lose)


@bug
def prefix_key_without_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "namespace", lambda request: (request.tenant_id, None))


@bug
def prefix_key_without_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        prefix, "namespace", lambda request: ("", None if request.adapter is None else request.adapter.digest)
    )


@bug
def prefix_key_of_the_block_alone(patch: pytest.MonkeyPatch) -> None:
    link = prefix.next_link
    patch.setattr(prefix, "next_link", lambda _, token_ids: link(b"", token_ids))


@bug
def blocks_leaked_by_an_early_end(patch: pytest.MonkeyPatch) -> None:
    stop = Scheduler._stop

    def leak(self: Scheduler, seq: Sequence) -> None:
        if not seq.num_outputs:
            seq.block_ids = ()
        stop(self, seq)

    patch.setattr(Scheduler, "_stop", leak)


@bug
def blocks_freed_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockManager.release

    def twice(self: BlockManager, block_ids: tuple[int, ...]) -> None:
        release(self, block_ids)
        release(self, [block for block in block_ids if self._refs[block]])

    patch.setattr(BlockManager, "release", twice)


@bug
def content_of_a_reused_block_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_forget", lambda self, block: None)


@bug
def one_block_too_few(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "blocks_for", lambda num_tokens: max(1, num_tokens // scheduler.BLOCK_SIZE))


@bug
def a_block_still_held_given_out(patch: pytest.MonkeyPatch) -> None:
    allocate = BlockManager.allocate

    def share(self: BlockManager, count: int) -> list[int]:
        held = [block for block, refs in enumerate(self._refs) if refs and self._key_of[block] is None]
        if count == 1 and len(held) > 2:
            self._refs[held[0]] += 1
            return [held[0]]
        return allocate(self, count)

    patch.setattr(BlockManager, "allocate", share)


@bug
def preemption_without_epoch(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def stay(self: Scheduler, draft: Any, seq: Sequence) -> None:
        preempt(self, draft, seq)
        seq.epoch -= 1

    patch.setattr(Scheduler, "_preempt", stay)


@bug
def prefix_registered_for_a_former_life(patch: pytest.MonkeyPatch) -> None:
    def register(self: Scheduler, row: ScheduledSequence) -> None:
        keys = prefix.extend_keys(row.seq)
        for index in range(row.start // 16, (row.start + row.num_tokens) // 16):
            if self.blocks._refs[row.block_ids[index]]:
                self.blocks.register(row.block_ids[index], keys[index])

    patch.setattr(Scheduler, "computed", register)


@bug
def prefix_registered_before_it_was_computed(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler._schedule

    def early(self: Scheduler, draft: Any, seq: Sequence) -> None:
        schedule(self, draft, seq)
        row = draft.scheduled.get(seq)
        if row is not None and not row.pending_input:
            self.computed(row)

    patch.setattr(Scheduler, "_schedule", early)


@bug
def service_not_charged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "charge", lambda self, seq, units: None)


@bug
def weight_ignored(patch: pytest.MonkeyPatch) -> None:
    enter = FairQueue.enter
    patch.setattr(
        FairQueue,
        "enter",
        lambda self, seq: enter(self, replace(seq, request=replace(seq.request, weight=1.0))),
    )


@bug
def newcomers_not_lifted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "_lift", lambda self, tenant: None)


@bug
def pending_token_fed_as_a_placeholder(patch: pytest.MonkeyPatch) -> None:
    submit = Flights.submit

    def wrong(self: Flights, plan: StepPlan) -> bool:
        rows = tuple(replace(row, pending_input=False) for row in plan.scheduled)
        return submit(self, replace(plan, scheduled=rows))

    patch.setattr(Flights, "submit", wrong)


@bug
def deadline_ignored_while_running(patch: pytest.MonkeyPatch) -> None:
    error = Answers.error

    def ignore(self: Answers, seq: Sequence, code: Any, message: str, *, spoilt: bool = False) -> None:
        if code != "deadline_exceeded" or seq.state is not SequenceState.RUNNING:
            error(self, seq, code, message, spoilt=spoilt)

    patch.setattr(Answers, "error", ignore)


@bug
def failed_step_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flights, "_fail", lambda self, flight, error, void=(): self._land(flight))


@bug
def spoilt_kv_still_found(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish
    patch.setattr(Scheduler, "finish", lambda self, seq, *, spoilt=False: finish(self, seq))


@bug
def failed_row_registered_as_a_prefix(patch: pytest.MonkeyPatch) -> None:
    take = Answers.take_row

    def register(self: Answers, scheduled: ScheduledSequence, *rest: Any) -> None:
        self._scheduler.computed(scheduled)
        take(self, scheduled, *rest)

    patch.setattr(Answers, "take_row", register)
    spoilt_kv_still_found(patch)


@bug
def blocks_leaked_by_a_failed_row(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish

    def leak(self: Scheduler, seq: Sequence, *, spoilt: bool = False) -> None:
        if spoilt:
            seq.block_ids = ()
        finish(self, seq, spoilt=spoilt)

    patch.setattr(Scheduler, "finish", leak)


@bug
def tokens_lost_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def lose(self: Scheduler, rows: Iterable[ScheduledSequence]) -> None:
        chosen = list(rows)
        for seq in {row.seq for row in chosen}:
            if seq.num_outputs:
                del seq.token_ids[-1]
        roll_back(self, chosen)

    patch.setattr(Scheduler, "roll_back", lose)


@bug
def token_of_a_lost_step_still_expected(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def expect(self: Scheduler, rows: Iterable[ScheduledSequence]) -> None:
        pending = {row: row.seq.num_pending for row in rows}
        roll_back(self, pending)
        for row, count in pending.items():
            row.seq.num_pending = count

    patch.setattr(Scheduler, "roll_back", expect)


@bug
def lost_step_taken_for_computed(patch: pytest.MonkeyPatch) -> None:
    roll_back = Scheduler.roll_back

    def skip(self: Scheduler, rows: Iterable[ScheduledSequence]) -> None:
        roll_back(self, [row for row in rows if row.samples])

    patch.setattr(Scheduler, "roll_back", skip)


@bug
def step_behind_a_lost_one_believed(patch: pytest.MonkeyPatch) -> None:
    take = Flights._take
    patch.setattr(Flights, "_take", lambda self, flight, void: take(self, flight, ()))


@bug
def leases_of_a_lost_step_kept(patch: pytest.MonkeyPatch) -> None:
    start_over = Flights._start_over

    def keep(self: Flights, flight: Any, error: Any) -> None:
        leases, flight.leases = flight.leases, []
        start_over(self, flight, error)
        flight.leases = leases

    patch.setattr(Flights, "_start_over", keep)


@bug
def lack_of_memory_ends_all_requests_of_a_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flights, "_start_over", Flights._fail)


@bug
def lack_of_memory_ends_a_request_at_once(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepSize.ran_out
    patch.setattr(StepSize, "ran_out", lambda self, plan, now: ran_out(self, plan, now) and False)


@bug
def request_that_never_fits_tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepSize.ran_out

    def hope(self: StepSize, plan: StepPlan, now: float) -> bool:
        if plan.num_tokens == 1:
            plan.scheduled[0].seq.num_starved = 0
        return ran_out(self, plan, now)

    patch.setattr(StepSize, "ran_out", hope)


@bug
def steps_as_large_as_before_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    ran_out = StepSize.ran_out

    def forget(self: StepSize, plan: StepPlan, now: float) -> bool:
        goes_on = ran_out(self, plan, now)
        self.limit = self._most
        return goes_on

    patch.setattr(StepSize, "ran_out", forget)


@bug
def aborted_prompt_still_scored(patch: pytest.MonkeyPatch) -> None:
    abort = EngineCore.abort

    def later(self: EngineCore, request_id: str) -> None:
        seq = self._answers.live.get(request_id)
        if seq is None or not 0 < seq.num_scored < seq.num_to_score:
            abort(self, request_id)

    patch.setattr(EngineCore, "abort", later)


@bug
def found_prefix_not_scored(patch: pytest.MonkeyPatch) -> None:
    start = Scheduler._start

    def skip(self: Scheduler, draft: Any, seq: Sequence, promised: int) -> bool:
        if seq.num_scored < seq.num_to_score and not seq.num_scored:
            found = self.blocks.lookup(prefix.extend_keys(seq)[: seq.num_prompt // 16])
            seq.num_scored = min(len(found) * 16, seq.num_to_score)
        return start(self, draft, seq, promised)

    patch.setattr(Scheduler, "_start", skip)


@bug
def prompt_scored_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def forget(self: Scheduler, draft: Any, seq: Sequence) -> None:
        preempt(self, draft, seq)
        seq.num_scored = 0

    patch.setattr(Scheduler, "_preempt", forget)


@bug
def scores_of_the_neighbour(patch: pytest.MonkeyPatch) -> None:
    collect = FakeRunner.collect

    def swap(self: FakeRunner, handle: object) -> StepResult:
        result = collect(self, handle)
        alike: dict[object, list[int]] = {}
        for index, scores in result.scores.items():
            size = [(len(part), part.num_top) for part in (scores.output, scores.prompt) if part is not None]
            alike.setdefault(tuple(size), []).append(index)
        swapped = {
            index: result.scores[other]
            for indices in alike.values()
            for index, other in zip(indices, reversed(indices), strict=True)
        }
        return replace(result, scores=swapped)

    patch.setattr(FakeRunner, "collect", swap)


@bug
def scores_of_an_event_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(answers, "cut_scores", lambda scores, start, end: None)


@bug
def parked_requests_never_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapter_scheduling._Turns, "first", lambda self, count: [])


FIRST_HISTORY = {"no_lease_for_the_step_in_flight": 340}
"""Where the search begins for a bug that few histories can show; 0 for the others."""


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    first = FIRST_HISTORY.get(name, 0)
    for seed in range(first, first + MAX_HISTORIES):
        try:
            play(seed)
        except Violation:
            return
    pytest.fail(f"{MAX_HISTORIES} histories did not catch {name}")
