"""A tenant's weight that changes while the tenant is being served."""

from __future__ import annotations

import asyncio

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database
from loraplex.control.tenancy.tenants import Tenants
from loraplex.serving.client.engine_client import EngineClient

INTERVAL_S = 1.0
log = structlog.get_logger("loraplex")


class WeightWatch:
    """Every request brings its tenant's weight; this sends the engine changes for requests that wait and run already,
    whichever server made them. A tenant that is not being served costs nothing."""

    def __init__(self, database: Database, tenants: Tenants) -> None:
        self._database = database
        self._tenants = tenants

    async def run(self, engine: EngineClient, *, interval_s: float = INTERVAL_S) -> None:
        """Until it is cancelled. While the database does not answer, the weights stay as they are."""
        while True:
            await asyncio.sleep(interval_s)
            if not engine.weights:
                continue
            try:
                found = await self._database.look_up(self._tenants.weights, tuple(engine.weights))
            except LoraplexError as error:
                log.debug("weights_not_read", reason=error.message)
                continue
            used = engine.weights
            engine.set_weights(
                {t: weight for t, weight in found.items() if used.get(t) not in (None, weight)}
            )
