"""Several schedulers that serve the same tenants, each with a fair queue of its own, and the exchange between them.

Demand never ends: each tenant keeps as many requests waiting on each of its replicas as `waiting` says. The exchange
is what a cluster client does each second: it asks every replica what its tenants were served, and tells it what the
others served.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count

from support.engine.scheduler_bench import Bench

STEP_S = 0.02
STEPS_AN_EXCHANGE = 50


class _Bench(Bench):
    """Checks its integrity at each exchange, not after each part of a step: it runs thousands."""

    def check(self) -> None:
        pass


class Replica:
    """`tenants`: requests that each keeps waiting here."""

    def __init__(self, tenants: Mapping[str, int], weights: Mapping[str, float]) -> None:
        self.bench = _Bench(blocks=200, seqs=8, tokens=64)
        self.tenants = dict(tenants)
        self.weights = weights
        self.tokens: Counter[str] = Counter()
        self.last_served: dict[str, int] = {}
        self.longest_pause: Counter[str] = Counter()
        self._names = count()

    def step(self, number: int) -> dict[str, int]:
        """One step, whose number is `number`; returns how many tokens of each request it computed."""
        bench = self.bench
        bench.now += STEP_S
        waiting = Counter(seq.request.tenant_id for seq in bench.scheduler.queue.requests)
        for tenant, wanted in self.tenants.items():
            for _ in range(wanted - waiting[tenant]):
                name = next(self._names)
                bench.add(
                    f"{tenant}-{name}",
                    20,
                    20,
                    tenant=tenant,
                    first=1000 * name,
                    weight=self.weights.get(tenant, 1.0),
                )
        served = bench.step()
        for name, tokens in served.items():
            tenant = name.split("-")[0]
            self.tokens[tenant] += tokens
            self.longest_pause[tenant] = max(
                self.longest_pause[tenant], number - self.last_served.get(tenant, number)
            )
            self.last_served[tenant] = number
        return served

    def exchange(self, elsewhere: Mapping[str, float]) -> dict[str, float]:
        Bench.check(self.bench)
        return self.bench.scheduler.queue.exchange_service(elsewhere, self.bench.now)


class Replicas:
    """The replicas of a cluster in step."""

    def __init__(
        self, tenants: Sequence[Mapping[str, int]], weights: Mapping[str, float] | None = None
    ) -> None:
        self.replicas = [Replica(each, weights or {}) for each in tenants]
        self.steps = 0
        self._served: list[dict[str, float]] = [{} for _ in tenants]

    def run(self, seconds: float, *, exchanges: bool) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.steps += 1
            for replica in self.replicas:
                replica.step(self.steps)
            if exchanges and self.steps % STEPS_AN_EXCHANGE == 0:
                self.exchange()

    def exchange(self) -> None:
        """What the others served up to the exchange before, to each."""
        total: Counter[str] = Counter()
        for served in self._served:
            total.update(served)
        self._served = [
            replica.exchange({tenant: units - own.get(tenant, 0.0) for tenant, units in total.items()})
            for replica, own in zip(self.replicas, self._served, strict=True)
        ]

    def lose(self, number: int) -> None:
        """One of the engines dies."""
        del self.replicas[number], self._served[number]

    def shares(self) -> dict[str, float]:
        """Each tenant's share of all tokens."""
        total: Counter[str] = Counter()
        for replica in self.replicas:
            total.update(replica.tokens)
        return {tenant: tokens / total.total() for tenant, tokens in total.items()}

    def forget(self) -> None:
        """Count tokens and pauses from now on."""
        for replica in self.replicas:
            replica.tokens.clear()
            replica.longest_pause.clear()
