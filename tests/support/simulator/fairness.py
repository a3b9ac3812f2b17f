"""Accounts of what backlogged tenants were served in a history of the engine core, beside the scheduler's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loraplex.engine.types import EngineRequest, StepPlan, TokenEvent
from support.simulator.oracle import Record, Violation


@dataclass(slots=True)
class _Pair:
    """Two tenants, and how far their service has drifted while both had requests waiting."""

    low: float | None = None
    high: float = 0.0


class Shares:
    """Service by tenant: 1 for a token of a prompt, 2 for one of an answer; what is computed again counts once.

    `weights` by tenant; `largest` is what the tenant with the least counter can still be charged for when another's
    turn comes: one prompt, and all that its running sequences will decode. `lead`: what a tenant may be ahead of it.
    """

    def __init__(self, weights: dict[str, float], largest: int, lead: float = 0.0) -> None:
        self._weights = weights
        self._bound = 2 * largest + lead
        self._served = dict.fromkeys(weights, 0.0)
        self._computed: dict[str, int] = {}
        self._unscheduled: dict[str, set[str]] = {tenant: set() for tenant in weights}
        self._pairs: dict[tuple[str, str], _Pair] = {}

    def told(self, record: Record, event: TokenEvent) -> None:
        self._served[record.request.tenant_id] += 2 * len(event.token_ids)

    def planned(self, plans: Iterable[StepPlan]) -> None:
        for plan in plans:
            for row in plan.scheduled:
                request_id, tenant = row.request_id, row.request.tenant_id
                done = self._computed.get(request_id, 0)
                self._unscheduled[tenant].discard(request_id)
                end = min(row.start + row.num_tokens, row.num_prompt)
                self._served[tenant] += max(0, end - done)
                self._computed[request_id] = max(done, end)

    def sent(self, request: EngineRequest) -> None:
        self._unscheduled[request.tenant_id].add(request.request_id)

    def backlog(self) -> set[str]:
        """Tenants with a request that was never scheduled. In such a history none ends before it is."""
        return {tenant for tenant, requests in self._unscheduled.items() if requests}

    def check(self, waiting: set[str]) -> None:
        """These tenants have waited since the last call. Raises Violation where two that did so for long drifted
        apart by more than twice `largest` and the lead."""
        pairs: dict[tuple[str, str], _Pair] = {}
        names = sorted(waiting)
        for index, one in enumerate(names):
            for other in names[:index]:
                drift = self._served[one] / self._weights[one] - self._served[other] / self._weights[other]
                pair = self._pairs.get((one, other)) or _Pair()
                pair.low = drift if pair.low is None else min(pair.low, drift)
                pair.high = (
                    drift if pair.low == drift and (one, other) not in self._pairs else max(pair.high, drift)
                )
                pairs[one, other] = pair
                if pair.high - pair.low > self._bound:
                    raise Violation(
                        f"{one} and {other} drifted apart by {pair.high - pair.low:.0f} units of service, over "
                        f"{self._bound:.0f}, while both were waiting"
                    )
        self._pairs = pairs
