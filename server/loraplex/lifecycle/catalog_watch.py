"""Pins and deletions that another server of the same database has made."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.control.audit.log import last_row
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.all_versions import find_living
from loraplex.control.db.database import Database
from loraplex.control.tenancy.tenants import Tenants
from loraplex.engine.kv.prefix_keys import MAX_OWNERS, next_owners
from loraplex.engine.types import Namespace
from loraplex.lifecycle.tenant_terms import TermsSender
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import EngineUnavailable, ServingError

INTERVAL_S = 1.0
ERASE_S = 60.0
"""How often prefixes of deleted owners are looked for: an engine that was away has missed the deletion."""
RETRY_S = 60.0
"""Time until a pin that the engine refused is tried again."""
log = structlog.get_logger("loraplex")


class CatalogWatch:
    """Reconciles the engine's pins with the catalog's, and drops versions that were deleted, whichever server did it.
    Every such change has a row in the audit log: as long as that has none to add, and nothing new comes into memory, a
    round costs one small query.

    The server that takes a change tells its engine by itself, shortly before or after the database. Therefore
    a pin is changed here only when two rounds agree on it. Every minute the prefixes of owners that were deleted are
    erased, which engines keep behind their KV caches, some of them on a disk across restarts: 10,000 owners are looked
    up a minute."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        tenants: Tenants,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._tenants = tenants
        self._terms = TermsSender(database, tenants)
        self._clock = clock
        self._seen: int | None = None
        self._living: set[str] = set()  # digests in the engine's memory that versions had, as of `_seen`
        self._missing: set[str] = set()  # digests to pin, by the round before
        self._surplus: set[str] = set()  # digests to unpin, by the round before
        self._refused: dict[str, float] = {}  # when the engine refused to pin them
        self._erased_at: float | None = None
        self._erased_to: Namespace | None = (
            None  # the last owner of the part before; None: all were looked at
        )

    async def run(self, engine: Engines, *, interval_s: float = INTERVAL_S) -> None:
        """Until it is cancelled. While the database or the engine does not answer, the engine stays as it is."""
        while True:
            await asyncio.sleep(interval_s)
            if not engine.healthy:
                continue
            try:
                await self._round(engine)
            except LoraplexError as error:
                log.debug("catalog_not_followed", reason=error.message)
            if self._erased_at is not None and self._clock() - self._erased_at < ERASE_S:
                continue
            self._erased_at = self._clock()
            try:
                await self._erase(engine)
            except LoraplexError as error:
                told = f"prefixes of deleted owners may stay for now: {error.message}; tried again"
                log.warning("prefixes_not_erased", reason=told)

    async def _round(self, engine: Engines) -> None:
        last = await self._database.run(last_row, self._database)
        is_due = any(self._clock() - at >= RETRY_S for at in self._refused.values())
        resident = engine.resident.keys()
        # One that joins may bring what was deleted while it was away.
        unknown = resident - self._living if last == self._seen else set(resident)
        if last == self._seen and not (self._missing or self._surplus or is_due or unknown):
            return
        living = await self._database.run(find_living, self._database, unknown)
        self._living = (self._living & resident if last == self._seen else set()) | living
        await self._drop(engine, unknown - living)
        wanted = {info.digest: info.ref() for info in await self._database.run(self._catalog.pinned)}
        await self._pin(engine, wanted)
        await self._unpin(engine, wanted)
        self._seen = last

    async def _erase(self, engine: Engines) -> None:
        owners = next_owners(await engine.prefix_owners(self._erased_to))
        self._erased_to = owners[-1] if len(owners) == MAX_OWNERS else None
        digests = {digest for _, digest in owners if digest is not None}
        await self._drop(engine, digests - await self._database.run(find_living, self._database, digests))
        for tenant_id in await self._database.run(
            self._tenants.deleted, {tenant_id for tenant_id, _ in owners}
        ):
            await engine.forget_tenant(tenant_id)

    async def _drop(self, engine: Engines, digests: set[str]) -> None:
        """Drop these digests that no version had, except those that were uploaded again since."""
        for digest in sorted(digests):
            if not await self._database.run(find_living, self._database, {digest}):
                await engine.drop(digest)

    async def _pin(self, engine: Engines, wanted: Mapping[str, AdapterRef]) -> None:
        missing, now = wanted.keys() - engine.pins.keys(), self._clock()
        self._refused = {digest: at for digest, at in self._refused.items() if digest in missing}
        due = {digest for digest in missing if now - self._refused.get(digest, -RETRY_S) >= RETRY_S}
        agreed = [wanted[digest] for digest in sorted(due & (self._missing | self._refused.keys()))]
        self._missing = due - {ref.digest for ref in agreed}
        if agreed:
            await self._terms.tell(engine, {ref.tenant_id for ref in agreed})
        for ref in agreed:
            try:
                await engine.pin(ref)
            except EngineUnavailable:
                raise
            except ServingError as error:
                if ref.digest not in self._refused:
                    log.warning("pin_failed", adapter=f"{ref.name}@v{ref.version}", reason=error.message)
                self._refused[ref.digest] = now

    async def _unpin(self, engine: Engines, wanted: Mapping[str, AdapterRef]) -> None:
        surplus = engine.pins.keys() - wanted.keys()
        agreed, self._surplus = surplus & self._surplus, surplus - self._surplus
        for digest in sorted(agreed):
            with contextlib.suppress(EngineUnavailable):  # an engine that is away comes back without the pin
                await engine.unpin(digest)
