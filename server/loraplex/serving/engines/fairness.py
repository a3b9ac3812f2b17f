"""Fairness over replicas: each engine learns what its tenants were served by the others.

A tenant that is served everywhere would get its full share on each engine, beside one that lives on one of them. The
engines count what others served as if they had done it themselves, as in D²LPM (Cao et al., arXiv 2501.14312).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from loraplex.serving.engines.replica import Replica
from loraplex.serving.errors import ServingError

EXCHANGE_S = 1.0
"""Time between two exchanges."""


class ServiceExchange:
    """Service of each engine between the last two exchanges, in units by tenant."""

    def __init__(self) -> None:
        self._served: dict[str, dict[str, float]] = {}

    async def exchange(self, replicas: Sequence[Replica]) -> None:
        """Tell each of these engines what the others served, and ask what it did. One that does not answer has served
        nothing. There is nothing to tell a single one."""
        if len(replicas) < 2:
            self._served = {}
            return
        total: Counter[str] = Counter()
        for served in self._served.values():
            total.update(served)
        answers = await asyncio.gather(*(self._with(replica, total) for replica in replicas))
        self._served = {replica.id: served for replica, served in zip(replicas, answers, strict=True)}

    async def _with(self, replica: Replica, total: Counter[str]) -> dict[str, float]:
        own = self._served.get(replica.id, {})
        elsewhere = {tenant: units - own.get(tenant, 0.0) for tenant, units in total.items()}
        try:
            return await replica.session.exchange_service(
                {tenant: units for tenant, units in elsewhere.items() if units > 0}
            )
        except ServingError:
            return {}
