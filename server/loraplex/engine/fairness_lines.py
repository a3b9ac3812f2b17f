"""Waiting requests: a line for each tenant's adapter, and the tenants by what they got."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import Sequence

Key = tuple[bool, int, int]
"""A place within one tenant: preempted ones first, then by priority, then arrival."""


@dataclass(slots=True, eq=False)
class Entry:
    """A place in a line. Removal only clears `seq`; the heap drops the husk when it comes up."""

    key: Key
    seq: Sequence | None
    line: Line

    def __lt__(self, other: Entry) -> bool:
        return self.key < other.key


@dataclass(slots=True, eq=False)
class Line:
    """One tenant's waiting requests for one adapter (`ref`; None: the base model). It is open while that adapter can be
    lent; the requests of closed lines wait, but could not run.

    `since`: when the adapter was first missing for one of them, None once one has started since. `opened`: when the
    adapter came, None while it is missing; `level`: the tenant's counter then."""

    tenant_id: str
    ref: AdapterRef | None
    is_open: bool
    size: int = 0
    entries: list[Entry] = field(default_factory=list)
    since: float | None = None
    opened: float | None = None
    level: float = 0.0

    def add(self, key: Key, seq: Sequence) -> Entry:
        entry = Entry(key, seq, self)
        heapq.heappush(self.entries, entry)
        self.size += 1
        return entry

    def take_out(self, entry: Entry) -> None:
        entry.seq = None
        self.size -= 1
        if len(self.entries) > 2 * self.size + 8:
            # Requests that come and are aborted behind a standing head would pile up husks for ever.
            self.entries = [entry for entry in self.entries if entry.seq is not None]
            heapq.heapify(self.entries)

    def first(self) -> Entry | None:
        while self.entries:
            if self.entries[0].seq is not None:
                return self.entries[0]
            heapq.heappop(self.entries)
        return None

    def sequences(self) -> list[Sequence]:
        """All of them, in order."""
        return [entry.seq for entry in sorted(self.entries) if entry.seq is not None]


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's account. `charged` is what it got, over the weight that was in force."""

    tenant_id: str
    weight: float
    charged: float = 0.0
    requests: int = 0  # in the engine, in whatever state
    queued: int = 0  # in all lines
    ready: int = 0  # in open ones: its backlog
    lines: dict[str | None, Line] = field(default_factory=dict)
    # The first entry of each open line, and husks: an entry that is no line's first any more.
    firsts: list[Entry] = field(default_factory=list)

    def stand(self, line: Line) -> None:
        """Its open line has another first entry than before."""
        first = line.first()
        if first is not None:
            heapq.heappush(self.firsts, first)
        if len(self.firsts) > 2 * len(self.lines) + 8:
            opened = (line.first() for line in self.lines.values() if line.is_open)
            self.firsts = [first for first in opened if first is not None]
            heapq.heapify(self.firsts)

    def head(self) -> Sequence | None:
        """The first of its requests that could run."""
        while self.firsts:
            entry = self.firsts[0]
            if entry.line.is_open and entry.seq is not None and entry.line.first() is entry:
                return entry.seq
            heapq.heappop(self.firsts)
            if entry.line.is_open and entry.seq is None:
                self.stand(entry.line)
        return None


class TenantHeap:
    """Tenants, the one that got least first; equal ones take turns in the order in which they came to stand there.

    What a tenant got only grows. That it grew is noticed when the tenant comes up: it stood too early, never too late.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Tenant]] = []
        self._places: dict[Tenant, tuple[float, int, Tenant]] = {}
        self._turn = 0

    def __contains__(self, tenant: Tenant) -> bool:
        return tenant in self._places

    def put(self, tenant: Tenant) -> None:
        heapq.heappush(self._heap, self._new_place(tenant))
        if len(self._heap) > 2 * len(self._places) + 8:
            self._heap = list(self._places.values())
            heapq.heapify(self._heap)

    def drop(self, tenant: Tenant) -> None:
        del self._places[tenant]

    def clear(self) -> None:
        self._heap.clear()
        self._places.clear()

    def least(self) -> Tenant | None:
        while self._heap:
            place = self._heap[0]
            tenant = place[2]
            if self._places.get(tenant) is not place:
                heapq.heappop(self._heap)
            elif place[0] < tenant.charged:
                heapq.heapreplace(self._heap, self._new_place(tenant))
            else:
                return tenant
        return None

    def _new_place(self, tenant: Tenant) -> tuple[float, int, Tenant]:
        self._turn += 1
        place = self._places[tenant] = (tenant.charged, self._turn, tenant)
        return place
