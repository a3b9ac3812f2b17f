"""Which tenant is served next: weighted virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 with weights: every tenant has a
counter of the service that it got, in tokens over its weight, and the waiting tenant with the least counter goes
next. A tenant that comes back is lifted to the least counter among those waiting (or to that of the last tenant
that left the queue): being away saves up nothing. Between two tenants that both keep waiting, the served amounts
per weight never drift apart by more than 2·max(largest charged prompt, decode cost · tokens in the batch).

The account is per tenant. More keys, adapters or requests never buy a larger share.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Protocol

from loraplex.engine.types import Sequence

PREFILL_COST = 1.0
"""Units of service for a prompt token that was computed."""
DECODE_COST = 2.0
"""Units for an output token."""
CACHED_COST = 0.1
"""Units for a prompt token whose KV was found in the prefix cache: it takes memory, hardly any work."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A place in one tenant's line. Removal only clears `seq`; the heap drops the husk when it comes up."""

    key: tuple[bool, int, int, int]
    seq: Sequence | None

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


@dataclass(slots=True, eq=False)
class _Tenant:
    tenant_id: str
    weight: float
    counter: float = 0.0
    requests: int = 0  # in the engine, in whatever state
    queued: int = 0  # of those, in the line
    line: list[_Entry] = field(default_factory=list)
    listed: bool = False  # has its one entry in the queue's heap


class WaitingQueue(Protocol):
    """What the scheduler asks of the policy that decides who is served next. `FairQueue` is the one that serves; a
    simulator may put first-come, round robin and the like in its place.

    A request enters, is pushed, starts (and is pushed again when it is preempted) and leaves; `remove` takes it out
    of the queue without a start, when it is parked or before it leaves.
    """

    def __len__(self) -> int:
        """Requests in the queue: neither the running ones nor those that are parked."""
        ...

    def __contains__(self, seq: Sequence) -> bool: ...
    def enter(self, seq: Sequence) -> None:
        """A request has come to the engine. Its weight is its tenant's from now on."""
        ...

    def leave(self, seq: Sequence) -> None:
        """A request has ended; it is not in the queue any more."""
        ...

    def push(self, seq: Sequence) -> None:
        """Into the queue: it has come, its adapter has, or it was preempted (then `seq.epoch` is above 0)."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Out of the queue, whatever its place."""
        ...

    def start(self, seq: Sequence) -> None:
        """Out of the queue, into the batch."""
        ...

    def head(self) -> Sequence | None:
        """Who is served next."""
        ...

    def charge(self, seq: Sequence, units: float) -> None:
        """So much was computed for a request that has not left."""
        ...

    def counter(self, tenant_id: str) -> float:
        """What the tenant got, per weight: the running requests of the tenant that got most are preempted first."""
        ...

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        ...

    def check_integrity(self, alive: dict[str, int], queued: set[Sequence]) -> None:
        """For tests: raise AssertionError unless it holds the `queued` sequences and no others, and knows of
        `alive` requests per tenant."""
        ...


class FairQueue:
    """The sequences that could run if there were room, in the order of fairness.

    `enter` and `leave` tell of every request's life in the engine, `push` and `remove` of its stay in the queue. A
    request that waits for its adapter is not in the queue: its tenant does not save up credit meanwhile, and is
    lifted when the adapter has come. Choosing costs O(log tenants), charging O(1).
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._entries: dict[Sequence, _Entry] = {}
        # One (counter, turn, tenant) for each tenant in the queue. Counters only grow, so an entry that is out of
        # date stands too early, never too late: it is put right when it comes up, and charging needs no heap.
        self._heap: list[tuple[float, int, _Tenant]] = []
        self._idle: list[tuple[float, str]] = []
        self._turn = 0
        self._serial = 0
        self._active = 0
        self._floor = 0.0  # nobody will ever be lifted to less than this
        self._last_left: _Tenant | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

    def enter(self, seq: Sequence) -> None:
        """A request has come. Its weight (above 0) is its tenant's share from now on."""
        tenant_id, weight = seq.request.tenant_id, seq.request.weight
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._tenants[tenant_id] = _Tenant(tenant_id, weight)
        tenant.weight = weight
        tenant.requests += 1
        self._active += 1

    def leave(self, seq: Sequence) -> None:
        """A request has ended. A tenant that has none left is forgotten as soon as nothing hangs on its counter."""
        tenant_id = seq.request.tenant_id
        tenant = self._tenants[tenant_id]
        assert tenant.requests > tenant.queued, f"a request of tenant {tenant_id} ended inside the queue"
        tenant.requests -= 1
        self._active -= 1
        if self._active == 0:
            # Nobody waits and nobody runs: there is no competition whose fairness an old debt could serve.
            self._tenants.clear()
            self._heap.clear()
            self._idle.clear()
            self._last_left = None
            self._floor = 0.0
        elif tenant.requests == 0:
            heapq.heappush(self._idle, (tenant.counter, tenant_id))
            self._drop_idle()

    def push(self, seq: Sequence) -> None:
        """Put an entered request into its tenant's line: preempted ones first, then by priority, then arrival."""
        assert seq not in self._entries, f"request {seq.request_id} is in the queue already"
        tenant = self._tenants[seq.request.tenant_id]
        if tenant.queued == 0:
            self._lift(tenant)
        self._serial += 1
        entry = _Entry((seq.epoch == 0, -seq.request.priority, seq.order, self._serial), seq)
        heapq.heappush(tenant.line, entry)
        self._entries[seq] = entry
        tenant.queued += 1
        if not tenant.listed:
            tenant.listed = True
            self._list(tenant)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue, whatever its place."""
        self._entries.pop(seq).seq = None
        tenant = self._tenants[seq.request.tenant_id]
        tenant.queued -= 1
        if tenant.queued == 0:
            tenant.line.clear()
            self._last_left = tenant
        elif len(tenant.line) > 2 * tenant.queued + 8:
            # Requests that come and are aborted behind a standing head would pile up husks for ever.
            tenant.line = [entry for entry in tenant.line if entry.seq is not None]
            heapq.heapify(tenant.line)

    def start(self, seq: Sequence) -> None:
        """A sequence leaves the queue to run."""
        self.remove(seq)

    def head(self) -> Sequence | None:
        """The next to be served: the first in the line of the tenant that got the least."""
        tenant = self._least()
        if tenant is None:
            return None
        while (seq := tenant.line[0].seq) is None:
            heapq.heappop(tenant.line)
        return seq

    def charge(self, seq: Sequence, units: float) -> None:
        """Book service, in units of *_COST, on the tenant of a request in the engine."""
        tenant = self._tenants[seq.request.tenant_id]
        tenant.counter += units / tenant.weight

    def counter(self, tenant_id: str) -> float:
        """Service per weight, relative to the other tenants' counters. 0 for a tenant not known (any more)."""
        tenant = self._tenants.get(tenant_id)
        return 0.0 if tenant is None else tenant.counter

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        return [(t.tenant_id, t.requests, t.counter) for t in self._tenants.values() if t.requests]

    def _least(self) -> _Tenant | None:
        while self._heap:
            counter, _, tenant = self._heap[0]
            if tenant.queued == 0:
                heapq.heappop(self._heap)
                tenant.listed = False
            elif counter < tenant.counter:
                heapq.heappop(self._heap)
                self._list(tenant)
            else:
                self._floor = max(self._floor, counter)
                return tenant
        return None

    def _list(self, tenant: _Tenant) -> None:
        # Equal counters take turns in the order in which they came to stand there.
        self._turn += 1
        heapq.heappush(self._heap, (tenant.counter, self._turn, tenant))

    def _lift(self, tenant: _Tenant) -> None:
        least = self._least() or self._last_left
        tenant.counter = max(tenant.counter, self._floor, least.counter if least else 0.0)

    def _drop_idle(self) -> None:
        # At or below the floor the next lift would overwrite the counter anyway: forgetting it changes nothing.
        # Above it, it is a debt, and kept, so that leaving and coming back does not clear it.
        while self._idle and self._idle[0][0] <= self._floor:
            _, tenant_id = heapq.heappop(self._idle)
            tenant = self._tenants.get(tenant_id)
            if tenant is not None and tenant.requests == 0 and tenant.counter <= self._floor:
                del self._tenants[tenant_id]

    def check_integrity(self, alive: dict[str, int], queued: set[Sequence]) -> None:
        """Raise AssertionError unless the accounts match the engine's: `alive` requests per tenant, and those
        that are `queued`."""
        requests = {t.tenant_id: t.requests for t in self._tenants.values() if t.requests}
        assert requests == alive, f"the fair queue knows of {requests}, the engine of {alive}"
        assert self._entries.keys() == queued, "the fair queue holds other requests than the engine thinks"
        assert sum(t.queued for t in self._tenants.values()) == len(queued), "a tenant's line is miscounted"
        listed = {t.tenant_id for _, _, t in self._heap}
        assert all(t.tenant_id in listed for t in self._tenants.values() if t.queued), (
            "a tenant is not in the heap"
        )
