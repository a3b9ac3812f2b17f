"""The terms that tenants are served by, from the database to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database
from loraplex.control.tenancy.tenants import Tenants
from loraplex.engine.tenant_terms import TenantTerms
from loraplex.serving.engines.engines import Engines

INTERVAL_S = 1.0
log = structlog.get_logger("loraplex")


class TermsSender:
    """Sends tenants' terms before the engine loads for them, and while they are being served. A request brings those
    that its key was checked with."""

    def __init__(self, database: Database, tenants: Tenants) -> None:
        self._database = database
        self._tenants = tenants

    async def tell(self, engine: Engines, tenant_ids: Collection[str]) -> dict[str, TenantTerms]:
        """Tell the engine these tenants' terms of now, and return them. Raises DatabaseUnavailable, DatabaseBusy."""
        terms = await self._database.look_up(self._tenants.terms, tuple(tenant_ids))
        engine.set_tenants(terms)
        return terms

    async def run(self, engine: Engines, *, interval_s: float = INTERVAL_S) -> None:
        """Send changes for requests that wait and run already, whichever server made them, until it is cancelled. A
        tenant that is not being served costs nothing. While the database does not answer, the terms stay as they
        are."""
        while True:
            await asyncio.sleep(interval_s)
            served = engine.served_tenants
            if not served:
                continue
            try:
                await self.tell(engine, served)
            except LoraplexError as error:
                log.debug("weights_not_read", reason=error.message)
