"""A tenant's weight and limits of memory that change while the tenant is being served."""

from __future__ import annotations

import asyncio

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database
from loraplex.control.tenancy.tenants import Tenants
from loraplex.serving.client.engine_client import EngineClient

INTERVAL_S = 1.0
log = structlog.get_logger("loraplex")


class TermsWatch:
    """A tenant's terms are sent before its requests; this sends changes for requests that wait and run already,
    whichever server made them. A tenant that is not being served costs nothing."""

    def __init__(self, database: Database, tenants: Tenants) -> None:
        self._database = database
        self._tenants = tenants

    async def run(self, engine: EngineClient, *, interval_s: float = INTERVAL_S) -> None:
        """Until it is cancelled. While the database does not answer, the terms stay as they are."""
        while True:
            await asyncio.sleep(interval_s)
            served = engine.served_tenants
            if not served:
                continue
            try:
                engine.set_tenants(await self._database.look_up(self._tenants.terms, tuple(served)))
            except LoraplexError as error:
                log.debug("weights_not_read", reason=error.message)
