"""Which tenant is served next: weighted virtual token counters, with predicted lengths and a quantum for residency.

Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2 with weights: every tenant has a
counter of the service that it got, in units over its weight, and the waiting tenant with the least goes next. A tenant
that comes back is lifted to the least counter among those waiting (or to that of the last tenant that left the
queue): being away saves up nothing.

Output is charged when it is drawn, long after a request was chosen. So the choice also counts what the running
requests of a tenant are still expected to be charged, by the length of its answers so far (the paper's appendix on
length prediction). Only the choice: the counters themselves, and so the lifts, never hold anything but what was
computed, and the expectation ends with its request.

What waits for an adapter that is not on the device could not run, and is no backlog. Its tenant comes back when the
adapter does, to `quantum` below the least at most: as much as others may have been served before it so that no adapter
had to leave the device (see `scheduler`).

Between two tenants that both keep waiting, the served units per weight never drift apart by more than
2·max(largest charged prompt, dearest output token · tokens in the batch) + quantum. The account is per tenant: more
keys, adapters or requests never buy a larger share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from loraplex.engine.config import Charges
from loraplex.engine.fairness_lines import Entry, Line, Tenant, TenantHeap
from loraplex.engine.output_lengths import OutputLengths
from loraplex.engine.types import Sequence

MAX_LEAD = 0.125
"""Of the bound without the quantum: who got so much more than the first in the queue gives up places to it."""
FORESIGHT = 0.5
"""The part of what is expected that counts in the choice. All of it would hold tenants level at the end of what runs,
nothing at its beginning; a half keeps their counters closest while it runs."""


class WaitingQueue(Protocol):
    """What the scheduler asks of the policy that decides who is served next. `FairQueue` is the one that serves; a
    simulator may put first-come, round robin and the like in its place.

    A request enters, is pushed, starts (and is pushed again when it is preempted) and leaves; `remove` takes it out
    of the queue without a start, before it leaves. Those that name an adapter can run while it is `open`.
    """

    def __len__(self) -> int:
        """Requests in the queue, whether they could run or not."""
        ...

    def __contains__(self, seq: Sequence) -> bool: ...
    def enter(self, seq: Sequence) -> None:
        """A request has come to the engine. Its weight is its tenant's from now on."""
        ...

    def leave(self, seq: Sequence) -> None:
        """A request has ended; it is not in the queue any more."""
        ...

    def push(self, seq: Sequence) -> None:
        """Into the queue: it has come, or it was preempted (then `seq.epoch` is above 0)."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Out of the queue, whatever its place."""
        ...

    def start(self, seq: Sequence) -> None:
        """Out of the queue, into the batch."""
        ...

    def open(self, digest: str) -> None:
        """This adapter is on the device, and may be lent out. In the beginning none is."""
        ...

    def close(self, digest: str) -> None:
        """It is not, or may not."""
        ...

    def head(self) -> Sequence | None:
        """Who is served next, of those that could run."""
        ...

    def charge(self, seq: Sequence, units: float) -> None:
        """So much was computed for a request that has not left; its own record tells of it already."""
        ...

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's weight has changed. Does nothing for one without a request in the engine."""
        ...

    def counter(self, tenant_id: str) -> float:
        """What the tenant got, per weight."""
        ...

    def rank(self, tenant_id: str) -> float:
        """What it got and is about to get, per weight: where memory runs short, the running requests of the tenant
        with most are preempted first."""
        ...

    def giving_way(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Those of these running requests that may be preempted for the first in the queue, should there be no room
        for both."""
        ...

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        ...

    def check_integrity(self, alive: dict[str, int], queued: set[Sequence]) -> None:
        """For tests: raise AssertionError unless it holds the `queued` sequences and no others, and knows of
        `alive` requests per tenant."""
        ...


@dataclass(slots=True)
class _Running:
    """A started request: its predicted number of output tokens, and the units that it is expected to bring yet."""

    length: float
    rest: float


class FairQueue:
    """Weighted fair queueing by tenant.

    Choosing costs O(log tenants), and so do starting and charging; `open` and `close` cost as much for each tenant that
    waits for that adapter, however many its requests. `capacity` is the number of token positions that fit into the
    batch: no tenant is expected to bring more than all of them, and an eighth of the bound that follows from it is the
    lead for which a tenant's running requests give way.
    """

    def __init__(
        self,
        charges: Charges | None = None,
        *,
        quantum: float = 0.0,
        capacity: float = inf,
        foresight: float = FORESIGHT,
    ) -> None:
        self._foresight = foresight
        self._charges = Charges() if charges is None else charges
        self._quantum = quantum
        self._most_expected = self._charges.decode * capacity
        self._max_lead = MAX_LEAD * 2 * self._charges.decode * capacity
        self._lengths = OutputLengths()
        self._tenants: dict[str, Tenant] = {}
        self._entries: dict[Sequence, Entry] = {}
        self._running: dict[Sequence, _Running] = {}
        self._open: set[str] = set()
        self._lines: dict[str, dict[Tenant, Line]] = {}  # of each adapter, those with somebody in them
        # The tenants with a backlog, by what they got, and that with what is under way.
        self._levels = TenantHeap(lambda tenant: tenant.charged)
        self._order = TenantHeap(self._rank)
        self._idle = TenantHeap(lambda tenant: tenant.charged)  # those without a request
        self._active = 0
        self._floor = 0.0  # the highest level that the least served has reached: nobody is lifted to less
        self._last_left: Tenant | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

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
        self._set_weight(tenant, weight)

    def leave(self, seq: Sequence) -> None:
        """A request has ended. A tenant that has none left is forgotten as soon as nothing hangs on its counter."""
        assert seq not in self._entries, f"request {seq.request_id} ended inside the queue"
        tenant = self._tenants[seq.request.tenant_id]
        if seq in self._running:
            self._stop(seq, tenant)
        if seq.num_outputs:
            self._lengths.learn(seq)
        tenant.requests -= 1
        self._active -= 1
        if self._active == 0:
            # Nobody waits and nobody runs: there is no competition whose fairness an old debt could serve.
            self._tenants.clear()
            self._idle.clear()
            self._last_left = None
            self._floor = 0.0
        elif tenant.requests == 0:
            self._idle.put(tenant)
            self._drop_idle()

    def push(self, seq: Sequence) -> None:
        """Put an entered request into its line: preempted ones first, then by priority, then arrival."""
        assert seq not in self._entries, f"request {seq.request_id} is in the queue already"
        request = seq.request
        tenant = self._tenants[request.tenant_id]
        if seq in self._running:
            self._stop(seq, tenant)
        digest = None if request.adapter is None else request.adapter.digest
        line = tenant.lines.get(digest)
        if line is None:
            line = tenant.lines[digest] = Line(digest, digest is None or digest in self._open)
            if digest is not None:
                self._lines.setdefault(digest, {})[tenant] = line
        if tenant.queued == 0:
            self._lift(tenant, 0.0)
        elif line.is_open and tenant.ready == 0:
            self._lift(tenant, self._quantum)
        key = (seq.epoch == 0, -request.priority, seq.order)
        entry = self._entries[seq] = line.add(key, seq)
        tenant.queued += 1
        if line.is_open:
            self._add_ready(tenant, 1)
            if line.first() is entry:
                tenant.stand(line)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue, whatever its place."""
        entry = self._entries.pop(seq)
        line = entry.line
        tenant = self._tenants[seq.request.tenant_id]
        line.take_out(entry)
        tenant.queued -= 1
        if line.is_open:
            self._add_ready(tenant, -1)
        if line.size == 0:
            del tenant.lines[line.digest]
            if line.digest is not None:
                self._lines[line.digest].pop(tenant)
                if not self._lines[line.digest]:
                    del self._lines[line.digest]

    def start(self, seq: Sequence) -> None:
        """A sequence leaves the queue to run; what it will cost counts from now on."""
        self.remove(seq)
        tenant = self._tenants[seq.request.tenant_id]
        length = self._lengths.predict(seq)
        rest = self._rest(seq, length)
        self._running[seq] = _Running(length, rest)
        tenant.running += 1
        tenant.expected += rest

    def charge(self, seq: Sequence, units: float) -> None:
        """Book service on the tenant of a request in the engine."""
        tenant = self._tenants[seq.request.tenant_id]
        tenant.charged += units / tenant.weight
        running = self._running.get(seq)
        if running is not None:
            rest = self._rest(seq, running.length)
            less = running.rest - rest
            running.rest = rest
            tenant.expected -= less
            if less > units:
                self._fell(tenant)

    def _stop(self, seq: Sequence, tenant: Tenant) -> None:
        """It runs no more: what it was expected to bring yet is taken back."""
        rest = self._running.pop(seq).rest
        tenant.running -= 1
        tenant.expected = tenant.expected - rest if tenant.running else 0.0
        self._fell(tenant)

    def _cost(self, seq: Sequence) -> float:
        """Units that a request was charged so far, as if no part of its prompt had been found."""
        charges, adapter = self._charges, seq.request.adapter
        units = charges.prefill * seq.num_charged + charges.decode * seq.num_outputs
        return units if adapter is None else units * charges.price(adapter.rank)

    def _rest(self, seq: Sequence, length: float) -> float:
        """Units that a running request will be charged yet, if it ends at `length` output tokens."""
        charges, adapter = self._charges, seq.request.adapter
        prompt = charges.prefill * (len(seq.request.prompt_ids) - seq.num_charged)
        rest = prompt + charges.decode * max(0.0, length - seq.num_outputs)
        return rest if adapter is None else rest * charges.price(adapter.rank)

    # Adapters and weights.

    def open(self, digest: str) -> None:
        """Who waits for this adapter could run from now on."""
        self._open.add(digest)
        for tenant, line in self._lines.get(digest, {}).items():
            if tenant.ready == 0:
                self._lift(tenant, self._quantum)
            line.is_open = True
            self._add_ready(tenant, line.size)
            tenant.stand(line)

    def close(self, digest: str) -> None:
        """Who waits for this adapter waits for it to come."""
        self._open.remove(digest)
        for tenant, line in self._lines.get(digest, {}).items():
            line.is_open = False
            self._add_ready(tenant, -line.size)

    def set_weight(self, tenant_id: str, weight: float) -> None:
        """A tenant's share is another from now on. Does nothing for one without a request in the engine."""
        tenant = self._tenants.get(tenant_id)
        if tenant is not None and tenant.requests:
            self._set_weight(tenant, weight)

    def _set_weight(self, tenant: Tenant, weight: float) -> None:
        if weight != tenant.weight:
            tenant.weight = weight
            self._fell(tenant)

    # Choosing.

    def head(self) -> Sequence | None:
        """The next to be served: the first of the tenant that got, and is about to get, the least."""
        tenant = self._order.least()
        return None if tenant is None else tenant.head()

    def counter(self, tenant_id: str) -> float:
        """Service per weight, relative to the other tenants' counters. 0 for a tenant not known (any more)."""
        tenant = self._tenants.get(tenant_id)
        return 0.0 if tenant is None else tenant.charged

    def rank(self, tenant_id: str) -> float:
        """The counter and what is expected of the tenant's running requests, as it counts in the choice."""
        tenant = self._tenants.get(tenant_id)
        return 0.0 if tenant is None else self._rank(tenant)

    def giving_way(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Whose tenant got so much more than the head's has got, and is about to get, that it must give way: long
        answers may hold the batch's memory long after their tenant has had its share. What a request itself was charged
        does not count against it: else large prompts of ever new tenants would preempt each other, and none end."""
        behind = self._tenants[head.request.tenant_id]
        level, weight = self._rank(behind), behind.weight
        chosen, tenants, least = [], self._tenants, level + self._max_lead / weight
        for seq in running:
            tenant = tenants[seq.request.tenant_id]
            if tenant.charged <= least:
                continue  # most of them, in most steps
            most = level + self._max_lead / min(weight, tenant.weight)
            if tenant.charged > most and tenant.charged - self._cost(seq) / tenant.weight > most:
                chosen.append(seq)
        return chosen

    def tenants(self) -> list[tuple[str, int, float]]:
        """(tenant, requests in the engine, counter) of every tenant that has a request in the engine."""
        return [(t.tenant_id, t.requests, t.charged) for t in self._tenants.values() if t.requests]

    def _rank(self, tenant: Tenant) -> float:
        return tenant.charged + self._foresight * min(tenant.expected, self._most_expected) / tenant.weight

    def _fell(self, tenant: Tenant) -> None:
        """Its rank may be lower than before."""
        if tenant in self._order:
            self._order.put(tenant)

    def _add_ready(self, tenant: Tenant, count: int) -> None:
        backlogged = tenant.ready > 0
        tenant.ready += count
        if backlogged == (tenant.ready > 0):
            return
        for heap in (self._levels, self._order):
            if backlogged:
                heap.drop(tenant)
            else:
                heap.put(tenant)
        if backlogged:
            self._last_left = tenant

    def _least_level(self) -> float:
        least = self._levels.least()
        if least is not None:
            self._floor = max(self._floor, least.charged)
        elif self._last_left is not None:
            return max(self._floor, self._last_left.charged)
        return self._floor

    def _lift(self, tenant: Tenant, credit: float) -> None:
        tenant.charged = max(tenant.charged, self._least_level() - credit)

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
        for tenant in self._tenants.values():
            lines = tenant.lines.values()
            where = f"tenant {tenant.tenant_id}"
            assert tenant.queued == sum(line.size for line in lines), f"{where}: a line is miscounted"
            assert tenant.ready == sum(line.size for line in lines if line.is_open), f"{where}: its backlog"
            assert all(line.is_open == (d is None or d in self._open) for d, line in tenant.lines.items()), (
                where
            )
            assert (tenant in self._order) == (tenant in self._levels) == (tenant.ready > 0), (
                f"{where}: heaps"
            )
            assert (tenant in self._idle) == (tenant.requests == 0), f"{where}: wrongly (not) idle"
            rests = [r.rest for s, r in self._running.items() if s.request.tenant_id == tenant.tenant_id]
            assert tenant.running == len(rests), f"{where}: runs {tenant.running}, not {len(rests)}"
            assert abs(tenant.expected - sum(rests)) < 1e-3, f"{where}: expected {tenant.expected}"
