"""Which tenant is served next: weighted virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 with weights: every tenant has a
counter of the service that it got, in units over its weight, and the waiting tenant with the least goes next. A tenant
that comes back is lifted to the least counter among those waiting: being away saves up nothing. While nobody waits,
everybody gets what he asks for, and it is the largest counter: what is taken from idle capacity is owed to nobody. (The
paper lifts to that of the last tenant that left the queue, whatever those who run have got since.)

What waits for an adapter that is not on the device could not run, and is no backlog. Its tenant comes back when the
adapter does.

Between two tenants that both keep waiting, the served units per weight never drift apart by more than
2·max(largest charged prompt, dearest output token · tokens in the batch). The account is per tenant: more
keys, adapters or requests never buy a larger share.
"""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.engine.fairness_lines import Entry, Line, Tenant, TenantHeap
from loraplex.engine.types import Sequence


class FairQueue:
    """Weighted fair queueing by tenant.

    A request enters, is pushed, removed when it starts (and pushed again when it is preempted) or ends, and leaves.
    Choosing costs O(log tenants), and so do starting and charging; `open` and `close` cost as much for each tenant that
    waits for that adapter, however many its requests.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._entries: dict[Sequence, Entry] = {}
        self._open: set[str] = set()
        self._lines: dict[str, dict[Tenant, Line]] = {}  # of each adapter, those with somebody in them
        self._order = TenantHeap()  # those with a backlog
        self._idle = TenantHeap()  # those without a request
        self._active = 0
        self._num_ready = 0
        self._floor = 0.0  # the highest level that the least served has reached: nobody is lifted to less
        self._most = 0.0  # the highest counter

    def __len__(self) -> int:
        """Requests in the queue, whether they could run or not."""
        return len(self._entries)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

    @property
    def num_ready(self) -> int:
        """Those that could run: they do not wait for an adapter."""
        return self._num_ready

    def is_ready(self, seq: Sequence) -> bool:
        """Whether a request in the queue is one of them."""
        return self._entries[seq].line.is_open

    def line(self, seq: Sequence) -> Line:
        """Where a request in the queue stands."""
        return self._entries[seq].line

    # Lives of requests.

    def enter(self, seq: Sequence) -> None:
        """A request has come. Its weight (above 0) is its tenant's share from now on."""
        tenant_id, weight = seq.request.tenant_id, seq.request.weight
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = self._tenants[tenant_id] = Tenant(tenant_id, weight)
        elif tenant.requests == 0:
            self._idle.drop(tenant)
        tenant.requests += 1
        self._active += 1
        tenant.weight = weight

    def leave(self, seq: Sequence) -> None:
        """A request has ended. A tenant that has none left is forgotten as soon as nothing hangs on its counter."""
        assert seq not in self._entries, f"request {seq.request_id} ended inside the queue"
        tenant = self._tenants[seq.request.tenant_id]
        tenant.requests -= 1
        self._active -= 1
        if self._active == 0:
            # Nobody waits and nobody runs: there is no competition whose fairness an old debt could serve.
            self._tenants.clear()
            self._idle.clear()
            self._floor = self._most = 0.0
        elif tenant.requests == 0:
            self._idle.put(tenant)
            self._drop_idle()

    def push(self, seq: Sequence) -> Line:
        """Put an entered request into its line: preempted ones first, then by priority, then arrival."""
        assert seq not in self._entries, f"request {seq.request_id} is in the queue already"
        request = seq.request
        tenant = self._tenants[request.tenant_id]
        digest = None if request.adapter is None else request.adapter.digest
        line = tenant.lines.get(digest)
        if line is None:
            is_open = digest is None or digest in self._open
            line = tenant.lines[digest] = Line(request.tenant_id, request.adapter, is_open)
            if digest is not None:
                self._lines.setdefault(digest, {})[tenant] = line
        if tenant.ready == 0 and (line.is_open or tenant.queued == 0):
            self._lift(tenant)
        key = (seq.epoch == 0, -request.priority, seq.order)
        entry = self._entries[seq] = line.add(key, seq)
        tenant.queued += 1
        if line.is_open:
            self._add_ready(tenant, 1)
            if line.first() is entry:
                tenant.stand(line)
        return line

    def remove(self, seq: Sequence) -> Line:
        """Take a sequence out of the queue, whatever its place. Returns the line in which it stood."""
        entry = self._entries.pop(seq)
        line = entry.line
        tenant = self._tenants[seq.request.tenant_id]
        line.take_out(entry)
        tenant.queued -= 1
        if line.is_open:
            self._add_ready(tenant, -1)
        if line.size == 0:
            digest = None if line.ref is None else line.ref.digest
            del tenant.lines[digest]
            if digest is not None:
                self._lines[digest].pop(tenant)
                if not self._lines[digest]:
                    del self._lines[digest]
        return line

    def charge(self, seq: Sequence, units: float) -> None:
        """Book service on the tenant of a request in the engine."""
        tenant = self._tenants[seq.request.tenant_id]
        tenant.charged += units / tenant.weight
        self._most = max(self._most, tenant.charged)

    # Adapters and weights.

    def lines(self, digest: str) -> Iterable[Line]:
        """The lines of those who wait for this adapter, or could run with it."""
        return self._lines.get(digest, {}).values()

    def open(self, digest: str) -> None:
        """This adapter is on the device, and may be lent out: who waits for it could run from now on."""
        self._open.add(digest)
        for tenant, line in self._lines.get(digest, {}).items():
            if tenant.ready == 0:
                self._lift(tenant)
            line.is_open = True
            self._add_ready(tenant, line.size)
            tenant.stand(line)

    def close(self, digest: str) -> None:
        """It is not, or may not: who waits for it waits for it to come. In the beginning all are closed."""
        self._open.remove(digest)
        for tenant, line in self._lines.get(digest, {}).items():
            line.is_open = False
            self._add_ready(tenant, -line.size)

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's share is another from now on. Does nothing for one without a request in the engine."""
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and tenant.requests:
            tenant.weight = weight

    # Choosing.

    def head(self) -> Sequence | None:
        """The next to be served, of those that could run: the first of the tenant that got the least."""
        tenant = self._order.least()
        return None if tenant is None else tenant.head()

    def counter(self, tenant_id: str) -> float:
        """Service per weight, relative to the other tenants' counters. 0 for a tenant not known (any more)."""
        tenant = self._tenants.get(tenant_id)
        return 0.0 if tenant is None else tenant.charged

    def is_backlogged(self, tenant_id: str) -> bool:
        """Whether a tenant with a request in the engine has one in the queue that could run."""
        return self._tenants[tenant_id].ready > 0

    def weight(self, tenant_id: str) -> float:
        """The share of a tenant with a request in the engine."""
        return self._tenants[tenant_id].weight

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        return [(t.tenant_id, t.requests, t.charged) for t in self._tenants.values() if t.requests]

    def _add_ready(self, tenant: Tenant, count: int) -> None:
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

    def _lift(self, tenant: Tenant) -> None:
        tenant.charged = max(tenant.charged, self._least_level())

    def _drop_idle(self) -> None:
        # At or below the floor the next lift would overwrite the counter anyway: forgetting it changes nothing.
        # Above it, it is a debt, and kept, so that leaving and coming back does not clear it.
        self._least_level()
        while (tenant := self._idle.least()) is not None and tenant.charged <= self._floor:
            self._idle.drop(tenant)
            del self._tenants[tenant.tenant_id]

    def check_integrity(self, alive: dict[str, int], queued: set[Sequence]) -> None:
        """Raise AssertionError unless the accounts match the engine's: `alive` requests per tenant, and those
        that are `queued`."""
        requests = {t.tenant_id: t.requests for t in self._tenants.values() if t.requests}
        assert requests == alive, f"the fair queue knows of {requests}, the engine of {alive}"
        assert self._entries.keys() == queued, "the fair queue holds other requests than the engine thinks"
        assert self._num_ready == sum(self.is_ready(seq) for seq in queued), (
            "those that could run are miscounted"
        )
        for tenant in self._tenants.values():
            lines = tenant.lines.values()
            where = f"tenant {tenant.tenant_id}"
            assert tenant.queued == sum(line.size for line in lines), f"{where}: a line is miscounted"
            assert tenant.ready == sum(line.size for line in lines if line.is_open), f"{where}: its backlog"
            assert all(line.is_open == (d is None or d in self._open) for d, line in tenant.lines.items()), (
                where
            )
            assert (tenant in self._order) == (tenant.ready > 0), f"{where}: wrongly (not) backlogged"
            assert (tenant in self._idle) == (tenant.requests == 0), f"{where}: wrongly (not) idle"
