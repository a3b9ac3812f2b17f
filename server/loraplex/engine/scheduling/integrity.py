"""Invariants of every running and waiting sequence. For tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from loraplex.adapters.cache.adapter_cache import Lease
from loraplex.engine.scheduling.block_needs import blocks_for
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.types import Sequence, SequenceState


def check_places(
    live: Iterable[Sequence],
    running: Mapping[Sequence, Lease | None],
    queue: FairQueue,
    held: Collection[Sequence],
) -> set[Sequence]:
    """Raise AssertionError unless the `live` sequences, and they alone, run or wait, each with what belongs there.
    Returns those in the queue."""
    queued: set[Sequence] = set()
    alive: Counter[str] = Counter()
    for seq in live:
        alive[seq.request.tenant_id] += 1
        places = (seq in running) + (seq in queue) + (seq in held)
        assert places == 1, f"{seq.request_id} is in {places} places"
        if seq in running:
            _check_running(seq, running[seq])
        else:
            _check_waiting(seq)
            if seq in queue:
                queued.add(seq)
    assert len(running) + len(queue) + len(held) == alive.total(), "a request that ended has kept its place"
    queue.check_integrity(alive, queued)
    return queued


def _check_running(seq: Sequence, lease: Lease | None) -> None:
    """Raise AssertionError unless a running sequence has what belongs to it: its state, its blocks, its lease."""
    name = seq.request_id
    assert seq.state is SequenceState.RUNNING, f"{name} runs as {seq.state}"
    assert blocks_for(seq.num_computed) <= len(seq.block_ids), f"{name} lacks blocks"
    assert seq.num_computed <= seq.num_tokens, f"{name} is ahead of its tokens"
    assert (lease is None) == (seq.request.adapter is None), f"{name} has the wrong lease"
    assert seq.slot == (-1 if lease is None else lease.slot), f"{name} has the wrong slot"


def _check_waiting(seq: Sequence) -> None:
    """Raise AssertionError unless a waiting sequence holds nothing."""
    assert seq.state is SequenceState.WAITING, f"{seq.request_id} waits as {seq.state}"
    assert not seq.block_ids, f"{seq.request_id} waits, and holds blocks"
    assert seq.slot == -1, f"{seq.request_id} waits, and has a slot"
