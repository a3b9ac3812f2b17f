"""Which decoding rows a step has where their time is bounded: each tenant's sequences take turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from loraplex.engine.scheduling.timing.step_times import StepLoad
from loraplex.engine.types import Sequence


def rank_of(seq: Sequence) -> int:
    """The rank of a sequence's adapter; 0 without one."""
    return 0 if seq.request.adapter is None else seq.request.adapter.rank


class RowTurns:
    """Each tenant has one row in every step. Further rows go round by tenant, as often as its weight says, while they
    fit; a tenant's sequences follow each other in the order of their arrival."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # by tenant, the order of the sequence whose turn was last

    def take(
        self, decoding: Iterable[Sequence], weight: Callable[[str], float], fits: Callable[[StepLoad], bool]
    ) -> tuple[StepLoad, frozenset[Sequence]]:
        """The load of a step's rows, and the sequences that have none in it. `weight` is that of a tenant."""
        load = StepLoad()
        for seq in decoding:
            _add(load, seq)
        if fits(load):
            return load, frozenset()
        load, resting, last = StepLoad(), set(), {}
        for number, seq in self._in_turn(decoding, weight):
            if number and not fits(load):
                resting.add(seq)
                continue
            _add(load, seq)
            last[seq.request.tenant_id] = seq.order
        self._last = last
        return load, frozenset(resting)

    def _in_turn(
        self, decoding: Iterable[Sequence], weight: Callable[[str], float]
    ) -> list[tuple[int, Sequence]]:
        """All sequences, those first whose turn is first, and how many of its tenant are before each."""
        lanes: dict[str, list[Sequence]] = {}
        for seq in decoding:
            lanes.setdefault(seq.request.tenant_id, []).append(seq)
        turns: list[tuple[float, int, Sequence]] = []
        for tenant_id, lane in lanes.items():
            lane.sort(key=lambda seq: seq.order)
            first = bisect_right(lane, self._last.get(tenant_id, -1), key=lambda seq: seq.order)
            each = weight(tenant_id)
            turns += [(number / each, number, seq) for number, seq in enumerate(lane[first:] + lane[:first])]
        turns.sort(key=lambda turn: turn[0])
        return [(number, seq) for _, number, seq in turns]


def _add(load: StepLoad, seq: Sequence) -> None:
    load.add(seq.num_computed, 1, sampled=1, rank=rank_of(seq))
