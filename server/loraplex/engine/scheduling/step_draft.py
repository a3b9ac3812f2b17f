"""A step's plan in the making."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from loraplex.engine.pooling import OF_EVERY_TOKEN
from loraplex.engine.scheduling.timing.step_bound import PromptTime
from loraplex.engine.types import (
    MEASURE_STEPS,
    BlockCopy,
    MeasuredPart,
    ScheduledSequence,
    Sequence,
    SequenceState,
    StepPlan,
)

SMALL_STEP = 64
"""Positions. On a CPU a larger step takes up to twice as long: it is not a recorded list of calls."""


@dataclass(slots=True)
class StepDraft:
    """A plan in the making."""

    now: float
    budget: int  # tokens that still fit into the step
    score_budget: int  # positions whose logits may still be kept
    max_running: int
    prompt_time: PromptTime | None = None  # bounds what has several positions; None: only `budget` does
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    measure: MeasuredPart | None = None
    preempted: list[str] = field(default_factory=list)
    activated: list[Sequence] = field(default_factory=list)
    """Sequences whose slice ends where their adapter begins to act."""
    of_base: list[ScheduledSequence] = field(default_factory=list)
    """The slices of those that have a second one in this step, which is in `scheduled`."""

    @property
    def num_slices(self) -> int:
        return len(self.scheduled) + len(self.of_base)

    @property
    def has_room(self) -> bool:
        """Whether the beginning of another prompt fits."""
        return self.budget > 0 and (self.prompt_time is None or self.prompt_time.has_room)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step so far."""
        slices = chain(self.scheduled.values(), self.of_base)
        return sum(row.num_tokens for row in slices) + (self.measure is not None)

    @contextmanager
    def within(self, most: int) -> Iterator[None]:
        """A budget of `most` tokens for what is added inside."""
        spared = max(0, self.budget - most)
        self.budget -= spared
        yield
        self.budget += spared

    def plan(self, step_id: int, loads: tuple[str, ...], copies: tuple[BlockCopy, ...]) -> StepPlan:
        scheduled = (*self.of_base, *self.scheduled.values())
        return StepPlan(step_id, scheduled, tuple(self.preempted), loads, self.measure, copies)


def sort_running(
    running: Iterable[Sequence], restoring: Collection[Sequence]
) -> tuple[list[Sequence], list[Sequence], list[Sequence], list[Sequence]]:
    """The running sequences that have something to compute: those with one position, those whose positions hold forced
    tokens, those in their prompt, and those with a part to measure. Those in `restoring` have nothing yet."""
    decoding: list[Sequence] = []
    forced: list[Sequence] = []
    prefilling: list[Sequence] = []
    measuring: list[Sequence] = []
    for seq in running:
        if restoring and seq in restoring:
            continue
        lag = len(seq.token_ids) + seq.num_pending - seq.num_computed
        if lag == 1:
            decoding.append(seq)
        elif lag > 1:
            (forced if is_forced(seq) else prefilling).append(seq)
        elif seq.measured is not None and seq.num_computed < MEASURE_STEPS:
            measuring.append(seq)
    return decoding, forced, prefilling, measuring


def make_slice(
    seq: Sequence,
    start: int,
    count: int,
    slot: int,
    scores: bool,
    state: int,
    state_targets: tuple[int, ...],
) -> ScheduledSequence:
    """The slice of `count` positions from `start` on. The last of them is pending where the host does not know its
    token yet. `scores`: log probabilities of the prompt are wanted."""
    # Runs for every sequence of every step: work that decoding does not need is skipped.
    request, token_ids = seq.request, seq.token_ids
    num_prompt, num_known, end = len(request.prompt_ids), len(token_ids), start + count
    num_tokens = num_known + seq.num_pending
    pending = end > num_known
    assert not pending or count == 1, "only a sequence's newest token can be missing on the host"
    samples = end == num_tokens and request.sampling.max_tokens > 0
    score_start = start
    targets: tuple[int, ...] = ()
    if scores:
        # Recomputed after a preemption, a position has been scored already.
        score_start = max(start, seq.num_scored)
        targets = tuple(token_ids[score_start + 1 : min(end, seq.num_to_score) + 1])
    return ScheduledSequence(
        request,
        seq.order,
        seq.epoch,
        start,
        count,
        (0,) if pending else (token_ids[start],) if count == 1 else tuple(token_ids[start:end]),
        seq.block_ids,
        slot,
        samples,
        pending,
        num_tokens - num_prompt,
        score_start,
        targets,
        None if seq.pooled is None else pool_start(seq, start, end),
        tuple(token_ids[num_prompt:]) if samples and seq.tells_outputs else (),
        window_slot=seq.window_slot,
        state=state,
        state_targets=state_targets,
    )


def draft_part(
    draft: StepDraft, measuring: Iterable[Sequence], is_arriving: Callable[[str], bool]
) -> Sequence | None:
    """Plan a part of one running MeasureRequest of `measuring`, unless the step has one: so its time is bounded. One
    with fewer parts is first. Returns its sequence. `is_arriving`: of an adapter by its digest; one that is is not
    measured yet."""
    running = [
        seq
        for seq in measuring
        if seq.state is SequenceState.RUNNING
        and not (seq.request.adapter is not None and is_arriving(seq.request.adapter.digest))
    ]
    if not running or draft.measure is not None or draft.budget == 0:
        return None
    seq = min(running, key=lambda seq: (seq.num_computed, seq.order))
    draft.budget -= 1
    draft.measure = MeasuredPart(seq.request, seq.order, seq.epoch, seq.num_computed, seq.slot)
    seq.num_computed += 1
    return seq


def pool_start(seq: Sequence, start: int, end: int) -> int:
    """The first position of the slice start … end-1 whose hidden state is wanted; `end` if none is. Computed again
    after a preemption, a position has been added already."""
    assert seq.pooled is not None
    if seq.request.pooling in OF_EVERY_TOKEN:
        return min(end, max(start, seq.pooled.num_positions))
    if seq.request.pooling == "cls":
        return end if start or seq.pooled.num_positions else 0
    return end - (end == seq.num_prompt)


def is_forced(seq: Sequence) -> bool:
    """Whether the next positions of a sequence with several hold output tokens that a grammar forced, and that were
    not computed before. They are part of decoding: a prompt's share of a step is not theirs."""
    return seq.num_computed >= max(seq.num_prompt, seq.lost_until)
