"""Bugs to plant into state slots, of sequences of a model with layers that keep a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv.states import StateSlots
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import Sequence


def slot_kept_by_a_preempted_sequence(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, draft: Any, seq: Sequence) -> None:
        seq.state_slot = -1
        preempt(self, draft, seq)

    patch.setattr(Scheduler, "_preempt", keep)


def slot_still_held_given_out(patch: pytest.MonkeyPatch) -> None:
    take = StateSlots.take

    def share(self: StateSlots) -> int:
        return min(self._held) if len(self._held) > 1 else take(self)

    patch.setattr(StateSlots, "take", share)


def states_go_on_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    def go_on(self: SequenceBlocks, seq: Sequence, start: int) -> None:
        seq.num_computed = min(seq.num_computed, start)

    patch.setattr(SequenceBlocks, "begin_again", go_on)


def prefix_found_without_its_state(patch: pytest.MonkeyPatch) -> None:
    find, computed = SequenceBlocks.find, SequenceBlocks.computed

    def without_states(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: SequenceBlocks, *given: Any) -> Any:
            kept, self.places.num_slots = self.places.num_slots, 0
            try:
                return call(self, *given)
            finally:
                self.places.num_slots = kept

        return wrong

    patch.setattr(SequenceBlocks, "find", without_states(find))
    patch.setattr(SequenceBlocks, "computed", without_states(computed))


def two_slices_of_a_state_in_one_step(patch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler._schedule

    def go_on(self: Scheduler, draft: Any, seq: Sequence, **limits: Any) -> None:
        schedule(self, draft, seq, **limits)
        part = draft.scheduled.get(seq)
        if part is not None and part.slot != seq.slot and seq.num_computed == seq.request.adapter_from:
            draft.activated.append(seq)

    patch.setattr(Scheduler, "_schedule", go_on)


def slot_lost_at_an_early_end(patch: pytest.MonkeyPatch) -> None:
    def leak(self: SequenceBlocks, seq: Sequence) -> None:
        if not seq.num_outputs:
            seq.state_slot = -1
        drop(self, seq)

    drop = SequenceBlocks.drop
    patch.setattr(SequenceBlocks, "drop", leak)


def slot_released_twice(patch: pytest.MonkeyPatch) -> None:
    release = StateSlots.release

    def twice(self: StateSlots, slot: int) -> None:
        release(self, slot)
        self._free.append(slot)

    patch.setattr(StateSlots, "release", twice)


STATE_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    slot_kept_by_a_preempted_sequence,
    slot_still_held_given_out,
    states_go_on_when_memory_runs_out,
    prefix_found_without_its_state,
    two_slices_of_a_state_in_one_step,
    slot_lost_at_an_early_end,
    slot_released_twice,
)
