"""Bugs to plant into windows and states, of sequences of a model with layers that keep a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.engine.kv.layers import STATE_GROUP
from loraplex.engine.kv.sequence_blocks import SequenceBlocks
from loraplex.engine.kv.sequence_states import SequenceStates
from loraplex.engine.kv.states import Places
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import BlockKey, Sequence


def place_kept_by_a_preempted_sequence(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, draft: Any, seq: Sequence) -> None:
        seq.window_slot = -1
        preempt(self, draft, seq)

    patch.setattr(Scheduler, "_preempt", keep)


def place_still_held_given_out(patch: pytest.MonkeyPatch) -> None:
    take = Places.take

    def share(self: Places) -> int:
        return min(self._held) if len(self._held) > 1 else take(self)

    patch.setattr(Places, "take", share)


def states_go_on_when_memory_runs_out(patch: pytest.MonkeyPatch) -> None:
    def go_on(self: SequenceBlocks, seq: Sequence, start: int) -> None:
        seq.num_computed = min(seq.num_computed, start)

    patch.setattr(SequenceBlocks, "begin_again", go_on)


def place_lost_at_an_early_end(patch: pytest.MonkeyPatch) -> None:
    def leak(self: SequenceBlocks, seq: Sequence, *, keeps: bool = True) -> None:
        if not seq.num_outputs:
            seq.window_slot = -1
        drop(self, seq, keeps=keeps)

    drop = SequenceBlocks.drop
    patch.setattr(SequenceBlocks, "drop", leak)


def place_released_twice(patch: pytest.MonkeyPatch) -> None:
    release = Places.release

    def twice(self: Places, place: int) -> None:
        release(self, place)
        self._free.append(place)

    patch.setattr(Places, "release", twice)


def a_named_state_is_written(patch: pytest.MonkeyPatch) -> None:
    advance = SequenceStates.advance

    def write(self: SequenceStates, seq: Sequence, end: int) -> tuple[int, ...] | None:
        targets = advance(self, seq, end)
        return None if targets is None else tuple(seq.states[0][1] for _ in targets)

    patch.setattr(SequenceStates, "advance", write)


def a_prefix_is_found_without_its_state(patch: pytest.MonkeyPatch) -> None:
    is_here = SequenceBlocks._is_here

    def begin(self: SequenceStates, seq: Sequence, num_found: int) -> None:
        seq.states = ((num_found, self.allocate(1)[0]),)

    def is_found(self: SequenceBlocks, key: BlockKey, group: int) -> bool:
        return group == STATE_GROUP or is_here(self, key, group)

    patch.setattr(SequenceBlocks, "_is_here", is_found)
    patch.setattr(SequenceStates, "begin", begin)


def what_is_in_flight_gets_a_name(patch: pytest.MonkeyPatch) -> None:
    def drop(self: SequenceStates, seq: Sequence, *, keeps: bool = True) -> None:
        for number, state in seq.states[-1:]:
            if number:
                self._name(seq, number, state)
        self.release([state for _, state in seq.states])
        seq.states = ()

    patch.setattr(SequenceStates, "drop", drop)


STATE_BUGS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    place_kept_by_a_preempted_sequence,
    place_still_held_given_out,
    states_go_on_when_memory_runs_out,
    a_named_state_is_written,
    a_prefix_is_found_without_its_state,
    what_is_in_flight_gets_a_name,
    place_lost_at_an_early_end,
    place_released_twice,
)
