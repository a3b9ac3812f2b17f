"""Invariants of every running and waiting sequence. For tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from loraplex.adapters.cache.adapter_cache import Lease
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.types import MEASURE_STEPS, Sequence, SequenceState


def check_places(
    live: Iterable[Sequence],
    running: Mapping[Sequence, Lease | None],
    queue: FairQueue,
    held: Collection[Sequence],
) -> None:
    """Raise AssertionError unless the `live` sequences, and they alone, run or wait, each with what belongs there."""
    alive = {*live}
    queued = queue.requests
    found = [*running, *queued, *held]
    assert len(found) == len(alive), _misplaced(alive, found)
    assert alive.issuperset(found), _misplaced(alive, found)
    for seq, lease in running.items():
        _check_running(seq, lease)
    for seq in chain(queued, held):
        # The conditions of _check_waiting: most sequences wait, and a call for each costs more than all else here.
        if seq.block_ids or seq.slot != -1 or seq.state is not SequenceState.WAITING:
            _check_waiting(seq)
    queue.check_integrity(Counter([seq.request.tenant_id for seq in alive]))


def _misplaced(alive: set[Sequence], found: list[Sequence]) -> str:
    counts = Counter(found)
    wrong = [f"{seq.request_id} is in {counts[seq]} places" for seq in alive if counts[seq] != 1]
    return ", ".join(wrong) or "a request that ended has kept its place"


def _check_running(seq: Sequence, lease: Lease | None) -> None:
    """Raise AssertionError unless a running sequence has what belongs to it: its state, its blocks, its lease."""
    name = seq.request_id
    assert seq.state is SequenceState.RUNNING, f"{name} runs as {seq.state}"
    if seq.measured is None:
        assert seq.num_computed <= seq.num_tokens, f"{name} is ahead of its tokens"
    else:
        assert not seq.block_ids, f"{name} is measured, and holds blocks"
        assert seq.num_computed <= MEASURE_STEPS, f"{name} is ahead of its parts"
    assert (lease is None) == (seq.request.adapter is None), f"{name} has the wrong lease"
    assert seq.slot == (-1 if lease is None else lease.slot), f"{name} has the wrong slot"


def _check_waiting(seq: Sequence) -> None:
    """Raise AssertionError unless a waiting sequence holds nothing."""
    assert seq.state is SequenceState.WAITING, f"{seq.request_id} waits as {seq.state}"
    assert not seq.block_ids, f"{seq.request_id} waits, and holds blocks"
    assert seq.slot == -1, f"{seq.request_id} waits, and has a slot"
