"""Invariants of an engine core, its scheduler and its queue, which only their own lists can break. Costs O(blocks +
requests)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from loraplex.adapters.cache.adapter_cache import Lease
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.scheduling.background import BackgroundSequences
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.scheduler import Scheduler
from loraplex.engine.types import MEASURE_STEPS, Sequence, SequenceState
from support.adapters.cache_integrity import check_cache
from support.simulator.kv_integrity import check_blocks, check_tables, check_windows


def check_core(core: EngineCore) -> None:
    """Raise AssertionError unless every request is in exactly one place, and every block, every lease and every place
    in the queue belongs to one that has not ended."""
    check_scheduler(core._scheduler, core._tracker.live.values())
    assert len(core._in_flight) <= core._config.lookahead, "a step was left uncollected"
    leases = core._in_flight.leases
    leases += [lease for lease in core._scheduler.running.values() if lease is not None]
    held = {id(lease) for lease in leases}
    assert len(held) == len(leases) == core._cache.usage().num_leases, "a lease is lost or held twice"
    check_cache(core._cache)


def check_scheduler(scheduler: Scheduler, live: Iterable[Sequence]) -> None:
    """Raise AssertionError unless exactly the `live` sequences are here, each either held, running, queued or in the
    background, with the blocks and lanes that this takes."""
    _check_places(scheduler, _foreground(scheduler.background, live))
    adapters = scheduler.adapters
    lanes = {*adapters._requested.values(), *adapters._unrequested, *adapters._aged}
    lanes |= {adapters._first} if adapters._first else set()
    waiting = {entry.lane for entry in scheduler.queue._entries.values()}
    assert lanes <= waiting, "an empty lane waits for an adapter"
    begun = (*scheduler.running, *scheduler.background.begun)
    blocks = scheduler.blocks
    check_tables(blocks, begun)
    held = [blocks.held(seq.block_ids) for seq in begun]
    check_blocks(blocks, held, scheduler._cache.residency().__contains__)
    check_windows(blocks.places, (seq.window_slot for seq in begun if seq.window_slot >= 0))
    if blocks.states is not None:
        held_states = [[state for _, state in seq.states] for seq in begun]
        check_blocks(blocks.states, held_states, scheduler._cache.residency().__contains__)


def is_named(core: EngineCore, state: int) -> bool:
    """Whether the prefix cache knows a state of a model with windows."""
    states = core._scheduler.blocks.states
    return states is not None and states._key_of[state] is not None


def check_queue(queue: FairQueue, alive: dict[str, int]) -> None:
    """Raise AssertionError unless the counts match the engine's `alive` requests per tenant, and those of the lanes
    their own."""
    requests = {t.tenant_id: t.requests for t in queue._tenants.values() if t.requests}
    assert requests == alive, f"the fair queue knows of {requests}, the engine of {alive}"
    sizes = Counter([entry.lane for entry in queue._entries.values()])
    assert all(lane.size == size for lane, size in sizes.items()), "a lane is miscounted"
    ready = sum(size for lane, size in sizes.items() if lane.is_open)
    assert queue._num_ready == ready, "those that could run are miscounted"
    for tenant in queue._tenants.values():
        lanes = tenant.lanes.values()
        where = f"tenant {tenant.tenant_id}"
        assert tenant.queued == sum(lane.size for lane in lanes), f"{where}: a lane is miscounted"
        assert tenant.ready == sum(lane.size for lane in lanes if lane.is_open), f"{where}: its backlog"
        are_open = [lane.is_open == (d is None or d in queue._open) for d, lane in tenant.lanes.items()]
        assert all(are_open), where
        assert (tenant in queue._order) == (tenant.ready > 0), f"{where}: wrongly (not) backlogged"
        assert (tenant in queue._idle) == (tenant.requests == 0), f"{where}: wrongly (not) idle"


def _foreground(background: BackgroundSequences, live: Iterable[Sequence]) -> list[Sequence]:
    """Those of `live` that are not in the background. Raise AssertionError unless exactly the background sequences are
    there, each with what belongs there."""
    live = list(live)
    counts = Counter([*background._waiting, *background.begun, *background.held])
    found = {seq for seq in live if seq.aside}
    assert set(counts) == found, "a background sequence is lost, or has ended and kept its place"
    for seq in background._waiting:
        assert seq.state is SequenceState.WAITING, f"{seq.request_id} waits as {seq.state}"
        assert not seq.block_ids, f"{seq.request_id} waits, and holds blocks"
    for seq in background.begun:
        assert counts[seq] == 1, f"{seq.request_id} is in two places"
        assert seq.state is SequenceState.RUNNING, f"{seq.request_id} has begun as {seq.state}"
    return [seq for seq in live if seq not in found]


def _check_places(scheduler: Scheduler, live: Iterable[Sequence]) -> None:
    """Raise AssertionError unless the `live` sequences, and they alone, run or wait, each with what belongs there."""
    alive = {*live}
    queued = scheduler.queue.requests
    found = [*scheduler.running, *queued, *scheduler.held]
    assert len(found) == len(alive), _misplaced(alive, found)
    assert alive.issuperset(found), _misplaced(alive, found)
    for seq, lease in scheduler.running.items():
        _check_running(seq, lease)
    for seq in chain(queued, scheduler.held):
        # The conditions of _check_waiting: most sequences wait, and a call for each costs more than all else here.
        if seq.block_ids or seq.slot != -1 or seq.state is not SequenceState.WAITING:
            _check_waiting(seq)
    check_queue(scheduler.queue, Counter([seq.request.tenant_id for seq in alive]))


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
