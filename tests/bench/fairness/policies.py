"""Who is served next, as others decide it: the fair queue's interface around four rules to compare it with.

They are written to be read, not to be fast: choosing looks at every tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from loraplex.engine.types import Sequence

Place = tuple[bool, int, int, int, Sequence]
"""In a line: preempted ones first, then by priority, then by arrival."""


@dataclass(eq=False)
class _Tenant:
    weight: float
    counter: float = 0.0  # service per weight
    turn: int = 0  # when it was last served, among tenants
    requests: int = 0
    queued: int = 0
    lines: dict[str | None, list[Place]] = field(default_factory=dict)  # by the adapter's digest, each a heap
    first: Place | None = None  # of those that could run, when `head` was last asked


class _Policy:
    """A subclass says which tenant's first request is next. `counter` tells the scheduler whom to preempt first: the
    larger, the sooner."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._queued: set[Sequence] = set()
        self._open: set[str | None] = {None}  # the adapters that can run, and the base model
        self._serial = count()
        self._turns = count(1)

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._queued

    def enter(self, seq: Sequence) -> None:
        weight = seq.request.weight
        tenant = self._tenants.setdefault(seq.request.tenant_id, _Tenant(weight))
        tenant.weight = weight
        tenant.requests += 1

    def leave(self, seq: Sequence) -> None:
        self._tenants[seq.request.tenant_id].requests -= 1

    def push(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.request.tenant_id]
        if tenant.queued == 0:
            self._returns(tenant)
        adapter = seq.request.adapter
        line = tenant.lines.setdefault(None if adapter is None else adapter.digest, [])
        heapq.heappush(line, (seq.epoch == 0, -seq.request.priority, seq.order, next(self._serial), seq))
        tenant.queued += 1
        self._queued.add(seq)

    def remove(self, seq: Sequence) -> None:
        self._queued.remove(seq)
        tenant = self._tenants[seq.request.tenant_id]
        tenant.queued -= 1
        if tenant.queued == 0:
            tenant.lines.clear()
            self._left(tenant)

    def start(self, seq: Sequence) -> None:
        if seq.epoch == 0:  # to resume is no turn
            self._tenants[seq.request.tenant_id].turn = next(self._turns)
        self.remove(seq)

    def open(self, digest: str) -> None:
        self._open.add(digest)

    def close(self, digest: str) -> None:
        self._open.remove(digest)

    def head(self) -> Sequence | None:
        ready = []
        for tenant in self._tenants.values():
            tenant.first = min((line[0] for line in self._open_lines(tenant)), default=None)
            if tenant.first is not None:
                ready.append(tenant)
        chosen = min(ready, key=self._rank, default=None)
        return None if chosen is None or chosen.first is None else chosen.first[-1]

    def _open_lines(self, tenant: _Tenant) -> Iterator[list[Place]]:
        for digest, line in tenant.lines.items():
            while line and line[0][-1] not in self._queued:
                heapq.heappop(line)
            if line and digest in self._open:
                yield line

    def charge(self, seq: Sequence, units: float) -> None:
        tenant = self._tenants[seq.request.tenant_id]
        tenant.counter += units / tenant.weight

    def set_weight(self, tenant_id: str, weight: float) -> None:
        if tenant_id in self._tenants:
            self._tenants[tenant_id].weight = weight

    def counter(self, tenant_id: str) -> float:
        return 0.0

    def rank(self, tenant_id: str) -> float:
        return self.counter(tenant_id)

    def giving_way(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        return []

    def tenants(self) -> list[tuple[str, int, float]]:
        return [(name, t.requests, t.counter) for name, t in self._tenants.items() if t.requests]

    def check_integrity(self, alive: dict[str, int], queued: set[Sequence]) -> None:
        assert {name: t.requests for name, t in self._tenants.items() if t.requests} == alive
        assert self._queued == queued

    def _rank(self, tenant: _Tenant) -> tuple[float, int]:
        """The least goes next. Asked only of tenants with somebody who could run."""
        raise NotImplementedError

    def _returns(self, tenant: _Tenant) -> None:
        """It had nothing in the queue, and is about to."""

    def _left(self, tenant: _Tenant) -> None:
        """It has nothing in the queue any more."""


class FirstCome(_Policy):
    """In the order of arrival, whoever sent it. What servers without fairness do."""

    def _rank(self, tenant: _Tenant) -> tuple[float, int]:
        assert tenant.first is not None
        fresh, _, order, *_ = tenant.first
        return fresh, order


class RoundRobin(_Policy):
    """One request a tenant in turn, however large it is."""

    def _rank(self, tenant: _Tenant) -> tuple[float, int]:
        assert tenant.first is not None
        return tenant.first[0], tenant.turn  # who was preempted goes on first


class LeastCounter(_Policy):
    """The tenant that got the least service since the beginning. Without a lift, being away saves up credit."""

    def _rank(self, tenant: _Tenant) -> tuple[float, int]:
        return tenant.counter, tenant.turn

    def counter(self, tenant_id: str) -> float:
        return self._tenants[tenant_id].counter


class PlainVtc(LeastCounter):
    """Algorithm 2 of Sheng et al. (OSDI 2024) with weights: as the least counter, and who comes back is lifted to the
    least counter in the queue, or to that of the last tenant that left it. Tokens are charged as they are computed;
    there is no prediction."""

    def __init__(self) -> None:
        super().__init__()
        self._last: _Tenant | None = None

    def _returns(self, tenant: _Tenant) -> None:
        waiting = [other.counter for other in self._tenants.values() if other.queued]
        if waiting:
            tenant.counter = max(tenant.counter, min(waiting))
        elif self._last is not None:
            tenant.counter = max(tenant.counter, self._last.counter)

    def _left(self, tenant: _Tenant) -> None:
        self._last = tenant
