"""Which adapters are loaded next, and which may be scheduled.

The cost of a step does not grow with requests or tenants: lanes of requests are moved, not requests.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from loraplex.adapters.cache.adapter_cache import AdapterCache, Lease, Residency
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.scheduling.expected_adapters import ExpectedAdapter, ExpectedAdapters
from loraplex.engine.scheduling.fair_queue import FairQueue
from loraplex.engine.scheduling.tenant_heap import TenantLane
from loraplex.engine.scheduling.tenant_turns import AgedTurns, LoadTurns
from loraplex.engine.types import Sequence

MAX_COMPARED = 16
"""Tenants that are compared for precedence: the least served of them has it. The next in turn replaces each that
leaves."""
MAX_REQUESTED = 8
"""Adapters that one step may newly request."""
MAX_STUCK = 16
"""No other adapter is requested while this number of them waits in host memory for device memory."""
MAX_STUCK_OF_TENANT = 2
"""The same limit for the adapters of one tenant."""

Running = dict[Sequence, Lease | None]


@dataclass(slots=True)
class PendingAdapters:
    """Adapters with waiting requests, as a step found them: the digests that are loading, and why others cannot be
    loaded; `refused` are lanes whose tenant may not have an adapter of such a size on the device."""

    loading: dict[str, None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[TenantLane, str] = field(default_factory=dict)

    def unservable(self, queue: FairQueue) -> list[tuple[Sequence, str]]:
        """The requests that wait for an adapter that cannot be loaded, or not for their tenant, and why."""
        failed = [(lane, why) for digest, why in self.failed.items() for lane in queue.lanes(digest)]
        failed += [
            (lane, why)
            for lane, why in self.refused.items()
            if lane.ref is not None and lane.ref.digest not in self.failed
        ]
        return [(seq, why) for lane, why in failed for seq in lane.sequences()]


class AdapterScheduler:
    """Requests the adapters that the queue's closed lanes wait for. Opens and closes lanes as adapters are loaded and
    evicted.

    A lane ages from the moment when its adapter was first missing until one of its requests runs. After `aging_s` it
    may get precedence: its adapter is requested before all others until a request of the lane runs, or until the
    adapter has been on the device for another `aging_s` without that. While an adapter with precedence finds no device
    memory, no other adapter is requested, and the resident ones are drained one by one. Pages only become free then, so
    that adapters in constant use cannot keep it out. Requests on the base model are still scheduled. Precedence brings
    the adapter, not a place in the batch: the fair queue decides that.

    Tenants take turns in requests for adapters; each tenant's go by the order in which its requests would run. Of the
    tenants whose turn is near, the least served has precedence. So a tenant that asks for a thousand adapters delays
    another tenant's adapter by one or two loads, not by a thousand.

    An adapter with waiting requests is not evicted for a tenant that got more service than theirs. `load_charge` is the
    charge for loading an adapter, for each of its ranks. `lead_s`: the seconds of a waiting sequence's first step, as
    `AdapterCache.request` takes them.
    """

    def __init__(
        self,
        cache: AdapterCache[Any],
        queue: FairQueue,
        *,
        aging_s: float,
        load_charge: float,
        lead_s: Callable[[Sequence], float] = lambda seq: 0.0,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._aging_s = aging_s
        self._load_charge = load_charge
        self._lead_s = lead_s
        self.expected = ExpectedAdapters()
        self._schedulable: frozenset[str] = frozenset()
        self._unrequested = LoadTurns()  # closed lanes whose adapter was not requested
        self._requested: dict[str, TenantLane] = {}  # by digest, the lane that was charged for it
        self._aging: deque[tuple[float, TenantLane]] = deque()
        self._aged = AgedTurns()  # closed lanes
        self._first: TenantLane | None = None  # has precedence
        self._drained_for: TenantLane | None = None
        self._draining: set[str] = set()

    # Requests.

    def request_joined(self, lane: TenantLane, now: float) -> None:
        """A request was added to a lane, at `now`."""
        if lane.ref is None:
            return
        if lane.size > 1:
            self._unrequested.first_changed(lane)
        elif lane.is_open:
            lane.opened, lane.level = now, self._queue.counter(lane.tenant_id)
        else:
            self._lane_closed(lane, now)

    def request_left(self, lane: TenantLane, *, started: bool = False) -> None:
        """A request was removed from a lane: it has `started`, or it has ended."""
        if lane.ref is None:
            return
        if started:
            lane.since = None
            if lane is self._first:
                self._first = None
        if not lane.size:
            self._lane_emptied(lane, lane.ref.digest)

    # Adapters.

    def step(self, now: float, running: Running) -> PendingAdapters:
        """Advance the adapters with waiting requests, and set what may be scheduled from now on."""
        pending = PendingAdapters()
        if not self._schedulable <= self._cache.on_device:  # deleted adapters must be requested again
            self._set_schedulable_adapters(self._schedulable & self._cache.on_device, now)
        kept = self._request_adapters(pending, now, running)
        self._set_schedulable_adapters(self._cache.on_device - kept, now)
        return pending

    def seconds_to_device(self, ref: AdapterRef) -> float:
        """Until this adapter is on the device if a request came for it now, as far as earlier loads tell."""
        is_cold = self._cache.state(ref.digest) == "cold"
        return self._cache.seconds_left(
            ref.digest, self._unrequested.num_before(ref.tenant_id) if is_cold else 0
        )

    def _request_adapters(self, pending: PendingAdapters, now: float, running: Running) -> Collection[str]:
        """Returns the adapters that may not be scheduled. While one with precedence waits for device memory, some must
        leave the device, and no other is requested.

        The cache evicts nothing that was requested in the same pass. So the adapter with precedence is requested first;
        that also keeps it on the device while its request waits for a place in the batch.
        """
        first, kept = self._precedence(now), set[str]()
        if first is not None and first.ref is not None:
            residency = self._request(pending, first, _always)
            if residency is Residency.NO_ROOM and self._cache.state(first.ref.digest) == "warm":
                kept = self._drain(first, running)
                if not self._cache.tenants.is_at_cap(first.ref):
                    return kept
        if not kept:
            self._drained_for = None
        stuck: Counter[str] = Counter()
        for lane in sorted(self._requested.values(), key=lambda lane: self._queue.counter(lane.tenant_id)):
            stuck[lane.tenant_id] += self._request(pending, lane, self._may_evict(lane)) is Residency.NO_ROOM
        requested, loading = 0, True
        while loading and requested < MAX_REQUESTED and stuck.total() < MAX_STUCK:
            loading = False
            for lane in self._unrequested.first(MAX_REQUESTED - requested):
                requested += 1
                if stuck[lane.tenant_id] < MAX_STUCK_OF_TENANT:
                    residency = self._request(pending, lane, self._may_evict(lane))
                    stuck[lane.tenant_id] += residency is Residency.NO_ROOM
                    loading |= residency is Residency.LOADING
        for expected in self.expected.pending(now):
            self._request_expected(pending, expected)
        return kept

    def _request_expected(self, pending: PendingAdapters, expected: ExpectedAdapter) -> None:
        """Request an adapter that no request waits for. None that one waits for is evicted for it. Its tenant is
        charged as for any load: else refused requests could evict other tenants' adapters for nothing."""
        ref = expected.ref
        residency = self._cache.request(ref, lambda digest: not self._queue.lanes(digest))
        if residency is Residency.LOADING:
            pending.loading[ref.digest] = None
        if self._is_requested(ref, residency) and not expected.is_charged:
            expected.is_charged = True
            self._queue.charge_tenant(ref.tenant_id, self._load_charge * ref.rank)
        if residency in (Residency.READY, Residency.FAILED):
            self.expected.remove(ref.digest)

    def _is_requested(self, ref: AdapterRef, residency: Residency) -> bool:
        """Whether the cache has begun to bring it."""
        return residency is Residency.LOADING or (
            residency is Residency.NO_ROOM and self._cache.state(ref.digest) == "warm"
        )

    def _drain(self, lane: TenantLane, running: Running) -> set[str]:
        """Adapters that no new request may use, so that this lane's adapter finds device memory: one at a time, the one
        whose running requests can end the soonest. The others stay schedulable, and the batch stays full. Pinned and
        reserved adapters are skipped, since they would not be evicted anyway, and for a tenant at its cap all but its
        own."""
        assert lane.ref is not None
        if lane is not self._drained_for:
            self._drained_for, self._draining = lane, set()
        candidates = self._cache.tenants.that_make_way(lane.ref)
        left: dict[
            str, int
        ] = {}  # for each adapter in use, the most tokens that one of its requests may still sample
        for seq, lease in running.items():
            ref = seq.request.adapter
            if lease is not None and ref is not None and ref.digest in candidates:
                most = seq.request.sampling.max_tokens - seq.num_outputs
                left[ref.digest] = max(most, left.get(ref.digest, 0))
        if not left:
            return candidates
        if self._draining.isdisjoint(left):
            self._draining.add(min(left, key=lambda digest: (left[digest], digest)))
        return self._draining

    def _request(
        self, pending: PendingAdapters, lane: TenantLane, may_evict: Callable[[str], bool]
    ) -> Residency:
        """Request the adapter that a lane waits for."""
        ref = lane.ref
        assert ref is not None, "a request on the base model waits for no adapter"
        if refusal := self._cache.tenants.refusal(ref):
            pending.refused[lane] = refusal
            return Residency.FAILED
        residency = self._cache.request(ref, may_evict, partial(self._lead_of, lane))
        if residency is Residency.FAILED:
            pending.failed[ref.digest] = self._cache.failure(ref.digest)
        elif residency is Residency.LOADING:
            pending.loading[ref.digest] = None
        if self._is_requested(ref, residency):
            self._unrequested.end_turn(lane)
            entry = lane.first()
            if ref.digest not in self._requested and entry is not None and entry.seq is not None:
                self._requested[ref.digest] = lane
                if not self.expected.is_charged(ref.digest, ref.tenant_id):
                    self._queue.charge(entry.seq, self._load_charge * ref.rank)
        return residency

    def _lead_of(self, lane: TenantLane) -> float:
        entry = lane.first()
        return 0.0 if entry is None or entry.seq is None else self._lead_s(entry.seq)

    def _may_evict(self, lane: TenantLane) -> Callable[[str], bool]:
        """Adapters that may be evicted for this lane's. An adapter with waiting requests is protected until their
        tenant got more service; one of the tenant's own, until it was used since it was loaded."""
        counter = self._queue.counter
        own = counter(lane.tenant_id)

        def may_evict(digest: str) -> bool:
            return all(
                own > other.level if other.tenant_id == lane.tenant_id else counter(other.tenant_id) > own
                for other in self._queue.lanes(digest)
            )

        return may_evict

    def _set_schedulable_adapters(self, digests: Collection[str], now: float) -> None:
        """Make these adapters, and no others, schedulable. Lanes open and close here alone."""
        if digests == self._schedulable:
            return
        before, self._schedulable = self._schedulable, frozenset(digests)
        # Sorted: the order of a set differs from one process to the next.
        for digest in sorted(before - self._schedulable):
            self._queue.close(digest)
            for lane in self._queue.lanes(digest):
                self._lane_closed(lane, now)
        for digest in sorted(self._schedulable - before):
            self._queue.open(digest)
            self._requested.pop(digest, None)
            for lane in self._queue.lanes(digest):
                lane.opened, lane.level = now, self._queue.counter(lane.tenant_id)
                self._unrequested.remove_lane(lane)
                self._aged.remove_lane(lane)

    def _precedence(self, now: float) -> TenantLane | None:
        """The lane whose adapter is requested before all others: of the tenants whose turn is near, the least served. A
        lane whose adapter is not on the device loses precedence to a tenant that got less service."""
        counter = self._queue.counter
        while self._aging and now - self._aging[0][0] >= self._aging_s:
            since, lane = self._aging.popleft()
            if lane.since == since and not lane.is_open and lane is not self._first:
                self._aged.append_lane(lane)
        first = self._first
        if first is not None and first.opened is not None and now - first.opened >= self._aging_s:
            first = self._first = None
        if first is None or first.opened is None:
            least = min(
                self._aged.first(MAX_COMPARED), key=lambda lane: counter(lane.tenant_id), default=None
            )
            if least is not None and (first is None or counter(first.tenant_id) > counter(least.tenant_id)):
                self._aged.end_turn(least)
                if first is not None:
                    self._aged.return_turn(first)
                self._first = least
        return self._first

    def _lane_closed(self, lane: TenantLane, now: float) -> None:
        lane.opened = None
        if lane.since is None:
            lane.since = now
            self._aging.append((now, lane))
        elif now - lane.since >= self._aging_s and lane is not self._first:
            self._aged.append_lane(lane)
        self._unrequested.append_lane(lane)

    def _lane_emptied(self, lane: TenantLane, digest: str) -> None:
        lane.since = None
        self._unrequested.remove_lane(lane)
        self._aged.remove_lane(lane)
        if lane is self._first:
            self._first = None
        if self._requested.get(digest) is lane:
            del self._requested[digest]
            for other in self._queue.lanes(digest):
                self._requested[digest] = other
                break


def _always(digest: str) -> bool:
    return True
