"""Which tenant is served next: weighted virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 with weights: every tenant has a
counter of the service that it got, in units over its weight, and the waiting tenant with the least goes next. A tenant
that comes back is lifted to the least counter among the waiting tenants, so that absence earns no credit. While no
tenant waits, it is lifted to the largest counter: use of idle capacity creates no debt. (The paper lifts to the counter
of the last tenant that left the queue.)

A request whose adapter is not on the device cannot run and is no backlog. Its tenant comes back to the queue when the
adapter is loaded.

Between two tenants that both keep waiting, the served units per weight never drift apart by more than 2·max(largest
charged prompt, dearest output token · tokens in the batch), and `step_bound.LEAD` more where steps are bounded by time.
Counters are per tenant: more keys, adapters or requests never give a larger share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, KeysView, Mapping

from loraplex.engine.scheduling.tenant_heap import Entry, TenantAccount, TenantHeap, TenantLane
from loraplex.engine.types import Sequence

LEAD = 2.0
"""Most by which service on other engines puts a tenant ahead of the least served one here, in multiples of what that
one got since the last exchange."""
UNSERVED = 10
"""Exchanges without service here, after which no more service elsewhere is added to a tenant's counter."""
EXCHANGE_S = 5.0
"""Longest time between two exchanges, in seconds: after a longer one the next only begins to count."""
MOST_SERVED = 10_000
"""Tenants whose service is counted for the next exchange: with more of them exchanges have ended, and nothing is
counted until the next one."""


class FairQueue:
    """Weighted fair queueing by tenant.

    A request enters, is pushed, removed when it starts (and pushed again when it is preempted) or ends, and leaves.
    Choosing, starting and charging cost O(log tenants). `open` and `close` cost O(log tenants) for each tenant that
    waits for the adapter, independent of the number of requests.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, TenantAccount] = {}
        self._weights: dict[str, float] = {}  # of all tenants that have another than 1
        self._entries: dict[Sequence, Entry] = {}
        self._open: set[str] = set()
        self._lanes: dict[
            str, dict[TenantAccount, TenantLane]
        ] = {}  # by adapter, the lanes that are not empty
        self._order = TenantHeap()  # tenants with a backlog
        self._idle = TenantHeap()  # tenants without a request
        self._active = 0
        self._num_ready = 0
        self._floor = (
            0.0  # the highest counter that the least served tenant has reached: no tenant is lifted to less
        )
        self._most = 0.0  # the highest counter
        # Of exchanges with other engines: when the last was, the least counter then, and the units served since. Until
        # the first one nothing is counted.
        self._exchanged: float | None = None
        self._exchanged_level = 0.0
        self._served: dict[str, float] = {}

    def __len__(self) -> int:
        """Requests in the queue, ready or not."""
        return len(self._entries)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

    @property
    def num_ready(self) -> int:
        """Ready requests: they do not wait for an adapter."""
        return self._num_ready

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a request in the queue is ready."""
        return self._entries[seq].lane.is_open

    @property
    def requests(self) -> KeysView[Sequence]:
        """The requests in the queue, ready or not."""
        return self._entries.keys()

    # Lives of requests.

    def enter(self, seq: Sequence) -> None:
        """A request was added."""
        tenant_id = seq.request.tenant_id
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._new_tenant(tenant_id)
        elif tenant.requests == 0:
            self._idle.drop(tenant)
        tenant.requests += 1
        self._active += 1

    def leave(self, seq: Sequence) -> None:
        """A request has ended. A tenant without requests is removed as soon as its counter has no effect."""
        assert seq not in self._entries, f"request {seq.request_id} ended inside the queue"
        tenant = self._tenants[seq.request.tenant_id]
        tenant.requests -= 1
        self._active -= 1
        if self._active == 0:
            # No request waits or runs: there is no competition in which an old debt could matter.
            self._tenants.clear()
            self._idle.clear()
            self._floor = self._most = self._exchanged_level = 0.0
        elif tenant.requests == 0:
            self._idle.put(tenant)
            self._drop_idle()
        elif tenant in self._order:
            self._order.holds_less(tenant)

    def push(self, seq: Sequence) -> TenantLane:
        """Put an entered request into its lane: requests that were begun before are first, then by priority, then by
        arrival."""
        assert seq not in self._entries, f"request {seq.request_id} is in the queue already"
        request = seq.request
        tenant = self._tenants[request.tenant_id]
        digest = None if request.adapter is None else request.adapter.digest
        lane = tenant.lanes.get(digest)
        if lane is None:
            is_open = digest is None or digest in self._open
            lane = tenant.lanes[digest] = TenantLane(request.tenant_id, request.adapter, is_open)
            if digest is not None:
                self._lanes.setdefault(digest, {})[tenant] = lane
        if tenant.ready == 0 and (lane.is_open or tenant.queued == 0):
            self._lift(tenant)
        key = (not seq.is_resumed, -request.priority, seq.order)
        entry = self._entries[seq] = lane.push_request(key, seq)
        tenant.queued += 1
        if lane.is_open:
            self._add_ready(tenant, 1)
            if lane.first() is entry:
                tenant.stand(lane)
        if seq.epoch and tenant in self._order:  # it was preempted
            self._order.holds_less(tenant)
        return lane

    def remove(self, seq: Sequence) -> TenantLane:
        """Remove a sequence from the queue. Returns its lane."""
        entry = self._entries.pop(seq)
        lane = entry.lane
        tenant = self._tenants[seq.request.tenant_id]
        lane.remove_entry(entry)
        tenant.queued -= 1
        if lane.is_open:
            self._add_ready(tenant, -1)
        if lane.size == 0:
            digest = None if lane.ref is None else lane.ref.digest
            del tenant.lanes[digest]
            if digest is not None:
                self._lanes[digest].pop(tenant)
                if not self._lanes[digest]:
                    del self._lanes[digest]
        return lane

    def charge(self, seq: Sequence, units: float) -> None:
        """Charge service to the tenant of a request in the engine. Other engines are told of no line of a batch."""
        self._charge(self._tenants[seq.request.tenant_id], units, is_told=not seq.request.batch)

    def charge_tenant(self, tenant_id: str, units: float) -> None:
        """Charge service to a tenant that may have no request in the engine. Nothing is charged while no tenant has
        one: then there is no competition."""
        if self._active == 0:
            return
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._new_tenant(tenant_id)
            self._idle.put(tenant)
        if tenant.requests == 0:
            self._lift(tenant)  # as if it had a request: the charge comes on top
        self._charge(tenant, units)

    def exchange_service(self, elsewhere: Mapping[str, float], now: float) -> dict[str, float]:
        """Add what other engines served these tenants since the last exchange to their counters. Returns what this
        engine served since. Both in units of service; `now` in seconds.

        Fairness over workers as in D²LPM (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", arXiv
        2501.14312). Its dispatcher keeps the counters; here each engine does, so that it also works alone. Whatever is
        sent, a tenant is at most `LEAD` exchanges ahead of the least served one, and is not held back any more once it
        has got nothing here for `UNSERVED` exchanges. A tenant without a request here is not charged. Nothing is added
        while no tenant waits."""
        level = self._least_level()
        most = level + LEAD * max(0.0, level - self._exchanged_level)
        last, self._exchanged, self._exchanged_level = self._exchanged, now, level
        served, self._served = self._served, {}
        for tenant in self._tenants.values():
            tenant.unserved = 0 if tenant.tenant_id in served else tenant.unserved + 1
        if last is None or now - last > EXCHANGE_S or self._order.least() is None:
            return served
        for tenant_id, units in elsewhere.items():
            known = self._tenants.get(tenant_id)
            # NaN is not above 0 either.
            if known is None or not known.requests or known.unserved > UNSERVED or not units > 0:
                continue
            if known.charged < most:
                known.charged = min(most, known.charged + units / known.weight)
                self._most = max(self._most, known.charged)
        return served

    # Adapters and weights.

    def lanes(self, digest: str) -> Iterable[TenantLane]:
        """The lanes of requests on this adapter."""
        return self._lanes.get(digest, {}).values()

    def open(self, digest: str) -> None:
        """This adapter is on the device and schedulable: its requests are ready from now on."""
        self._open.add(digest)
        for tenant, lane in self._lanes.get(digest, {}).items():
            if tenant.ready == 0:
                self._lift(tenant)
            lane.is_open = True
            self._add_ready(tenant, lane.size)
            tenant.stand(lane)

    def close(self, digest: str) -> None:
        """This adapter is not schedulable: its requests are not ready. At the start all adapters are closed."""
        self._open.remove(digest)
        for tenant, lane in self._lanes.get(digest, {}).items():
            lane.is_open = False
            self._add_ready(tenant, -lane.size)

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's weight (above 0) from now on, 1 until then."""
        if weight == 1.0:
            self._weights.pop(tenant_id, None)
        else:
            self._weights[tenant_id] = weight
        tenant = self._tenants.get(tenant_id)
        if tenant is not None:
            tenant.weight = weight

    # Choosing.

    def head(self) -> Sequence | None:
        """The next ready request: the first of the least served tenant."""
        tenant = self._order.least()
        return None if tenant is None else tenant.head()

    def heads(self, most: int, besides: Collection[str]) -> list[Sequence]:
        """The next ready request of each of the least served tenants, `most` of them, that are not in `besides`."""
        found = (tenant.head() for tenant in self._order.first(most, besides))
        return [seq for seq in found if seq is not None]

    def counter(self, tenant_id: str) -> float:
        """Service per weight, relative to the other tenants' counters. 0 for an unknown tenant."""
        tenant = self._tenants.get(tenant_id)
        return 0.0 if tenant is None else tenant.charged

    def lead_of(self, tenant_id: str) -> float:
        """How far ahead a tenant with a request in the engine was when it was last served before its turn."""
        return self._tenants[tenant_id].lead

    def passed(self, tenant_id: str, lead: float) -> None:
        """A tenant with a request in the engine is served before its turn, and `lead` ahead. Infinite: it is not ahead,
        and may be served so from any lead on."""
        self._tenants[tenant_id].lead = lead

    def is_backlogged(self, tenant_id: str) -> bool:
        """Whether a tenant with a request in the engine has a ready request in the queue."""
        return self._tenants[tenant_id].ready > 0

    def weight(self, tenant_id: str) -> float:
        """The weight of a tenant."""
        return self._weights.get(tenant_id, 1.0)

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        return [(t.tenant_id, t.requests, t.charged) for t in self._tenants.values() if t.requests]

    def _charge(self, tenant: TenantAccount, units: float, *, is_told: bool = True) -> None:
        tenant.charged += units / tenant.weight
        self._most = max(self._most, tenant.charged)
        if self._exchanged is not None and is_told:
            self._served[tenant.tenant_id] = self._served.get(tenant.tenant_id, 0.0) + units
            if len(self._served) > MOST_SERVED:
                self._served, self._exchanged = {}, None

    def _new_tenant(self, tenant_id: str) -> TenantAccount:
        tenant = self._tenants[tenant_id] = TenantAccount(tenant_id, self._weights.get(tenant_id, 1.0))
        return tenant

    def _add_ready(self, tenant: TenantAccount, count: int) -> None:
        backlogged = tenant.ready > 0
        tenant.ready += count
        self._num_ready += count
        if backlogged == (tenant.ready > 0):
            return
        if backlogged:
            self._order.drop(tenant)
        else:
            self._order.put(tenant)

    def _least_level(self) -> float:
        least = self._order.least()
        if least is None:
            return self._most
        self._floor = max(self._floor, least.charged)
        return self._floor

    def _lift(self, tenant: TenantAccount) -> None:
        tenant.charged = max(tenant.charged, self._least_level())

    def _drop_idle(self) -> None:
        # At or below the floor the next lift would overwrite the counter: dropping it changes nothing. A counter above
        # the floor is a debt and is kept, so that leaving and coming back does not clear it.
        self._least_level()
        while (tenant := self._idle.least()) is not None and tenant.charged <= self._floor:
            self._idle.drop(tenant)
            del self._tenants[tenant.tenant_id]
