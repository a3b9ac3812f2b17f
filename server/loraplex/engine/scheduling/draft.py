"""A step's plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.engine.types import ScheduledSequence, Sequence


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    now: float
    budget: int  # tokens that still fit into the step
    score_budget: int  # positions whose logits may still be kept
    max_running: int
    measures: bool = False  # an adapter's sites: of one in a step, so that its time is bounded
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


def pool_start(seq: Sequence, start: int, end: int) -> int:
    """The first position of the slice start … end-1 whose hidden state is wanted; `end` if none is. Computed again
    after a preemption, a position has been added already."""
    assert seq.pooled is not None
    if seq.request.pooling == "mean":
        return min(end, max(start, seq.pooled.num_positions))
    return end - (end == seq.num_prompt)
