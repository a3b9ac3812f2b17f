"""Waiting requests: a lane for each adapter of a tenant, and a heap of the tenants by the service that they got."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import Sequence

Key = tuple[bool, int, int]
"""The order within one tenant: requests that were begun before (preempted, or in another engine) are first, then by
priority, then by arrival."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request of a lane. Removal only clears `seq`; the heap drops the empty entry when it comes up."""

    key: Key
    seq: Sequence | None
    lane: TenantLane

    def __lt__(self, other: Entry) -> bool:
        return self.key < other.key


@dataclass(slots=True, eq=False)
class TenantLane:
    """One tenant's waiting requests for one adapter (`ref`; None: the base model). It is open while that adapter is
    schedulable; the requests of closed lanes cannot run.

    `since`: when the adapter was first missing for a request of the lane, None once one has started since. `opened`:
    when the adapter was loaded, None while it is missing; `level`: the tenant's counter at that time."""

    tenant_id: str
    ref: AdapterRef | None
    is_open: bool
    size: int = 0
    entries: list[Entry] = field(default_factory=list)
    since: float | None = None
    opened: float | None = None
    level: float = 0.0

    def push_request(self, key: Key, seq: Sequence) -> Entry:
        entry = Entry(key, seq, self)
        heapq.heappush(self.entries, entry)
        self.size += 1
        return entry

    def remove_entry(self, entry: Entry) -> None:
        entry.seq = None
        self.size -= 1
        if len(self.entries) > 2 * self.size + 8:
            # Requests that are aborted behind a waiting head would leave ever more empty entries.
            self.entries = [entry for entry in self.entries if entry.seq is not None]
            heapq.heapify(self.entries)

    def first(self) -> Entry | None:
        while self.entries:
            if self.entries[0].seq is not None:
                return self.entries[0]
            heapq.heappop(self.entries)
        return None

    def sequences(self) -> list[Sequence]:
        """All requests of the lane, in order."""
        return [entry.seq for entry in sorted(self.entries) if entry.seq is not None]


@dataclass(slots=True, eq=False)
class TenantAccount:
    """One tenant's counter and lanes. `charged` is the service that it got, each charge over the weight at that
    time."""

    tenant_id: str
    weight: float
    charged: float = 0.0
    requests: int = 0  # in the engine, in whatever state
    queued: int = 0  # requests in all lanes
    ready: int = 0  # requests in open lanes: its backlog
    lead: float = inf  # how far ahead it was when it was last served before its turn
    unserved: int = 0  # exchanges with other engines since it was last served here
    lanes: dict[str | None, TenantLane] = field(default_factory=dict)
    # The first entry of each open lane, and stale entries: those that are no lane's first any more.
    firsts: list[Entry] = field(default_factory=list)

    @property
    def held(self) -> float:
        """Running sequences, over the weight."""
        return (self.requests - self.queued) / self.weight

    def stand(self, lane: TenantLane) -> None:
        """The first entry of an open lane has changed."""
        first = lane.first()
        if first is not None:
            heapq.heappush(self.firsts, first)
        if len(self.firsts) > 2 * len(self.lanes) + 8:
            opened = (lane.first() for lane in self.lanes.values() if lane.is_open)
            self.firsts = [first for first in opened if first is not None]
            heapq.heapify(self.firsts)

    def head(self) -> Sequence | None:
        """The tenant's first ready request."""
        while self.firsts:
            entry = self.firsts[0]
            if entry.lane.is_open and entry.seq is not None and entry.lane.first() is entry:
                return entry.seq
            heapq.heappop(self.firsts)
            if entry.lane.is_open and entry.seq is None:
                self.stand(entry.lane)
        return None


_Rank = tuple[float, float, int, TenantAccount]
"""A tenant's counter, its running sequences over its weight, and its turn among equal tenants."""


class TenantHeap:
    """Tenants by counter, the least first; among equal counters the tenant with the fewest running sequences, then the
    first to arrive.

    A tenant that arrives is lifted to the least counter, and so is equal to the tenant that was next. By arrival alone
    it would wait a step more for its first place in the batch.

    Counters only grow. A grown counter is noticed when its tenant comes up: a tenant's rank is too early at times,
    never too late.
    """

    def __init__(self) -> None:
        self._heap: list[_Rank] = []
        self._ranks: dict[TenantAccount, _Rank] = {}
        self._turn = 0

    def __contains__(self, tenant: TenantAccount) -> bool:
        return tenant in self._ranks

    def put(self, tenant: TenantAccount) -> None:
        heapq.heappush(self._heap, self._new_rank(tenant))
        self._compact()

    def drop(self, tenant: TenantAccount) -> None:
        del self._ranks[tenant]

    def holds_less(self, tenant: TenantAccount) -> None:
        """A tenant has fewer running sequences: it may now be before its equals."""
        got, _, turn, _ = self._ranks[tenant]
        rank = self._ranks[tenant] = (got, tenant.held, turn, tenant)
        heapq.heappush(self._heap, rank)
        self._compact()

    def clear(self) -> None:
        self._heap.clear()
        self._ranks.clear()

    def least(self) -> TenantAccount | None:
        while self._heap:
            rank = self._heap[0]
            got, held, turn, tenant = rank
            if self._ranks.get(tenant) is not rank:
                heapq.heappop(self._heap)
            elif got < tenant.charged:
                heapq.heapreplace(self._heap, self._new_rank(tenant))
            elif held < tenant.held:
                self._ranks[tenant] = (got, tenant.held, turn, tenant)
                heapq.heapreplace(self._heap, self._ranks[tenant])
            else:
                return tenant
        return None

    def first(self, most: int, besides: Collection[str]) -> list[TenantAccount]:
        """The first `most` tenants that are not in `besides`. Costs O(log tenants) for each of both."""
        found: list[TenantAccount] = []
        passed: list[_Rank] = []
        while len(found) < most and (tenant := self.least()) is not None:
            passed.append(heapq.heappop(self._heap))
            if tenant.tenant_id not in besides:
                found.append(tenant)
        for rank in passed:
            heapq.heappush(self._heap, rank)
        return found

    def _new_rank(self, tenant: TenantAccount) -> _Rank:
        self._turn += 1
        rank = self._ranks[tenant] = (tenant.charged, tenant.held, self._turn, tenant)
        return rank

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._ranks) + 8:
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)
