"""Evicts deleted adapters from the engine, and removes pins that no version has any more."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Protocol

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.retention import Retention
from loraplex.control.db.database import Database
from loraplex.control.types import Removal, VersionInfo
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import EngineUnavailable, ServingError

log = structlog.get_logger("loraplex.admin")


class EngineAndCatalog(Protocol):
    """The services that are used here."""

    @property
    def database(self) -> Database: ...
    @property
    def catalog(self) -> Catalog: ...
    @property
    def engine(self) -> Engines: ...


async def evict_removed(services: EngineAndCatalog, removal: Removal) -> None:
    """Evict the deleted bytes from the engine's memory, and remove the pins of deleted versions. The deletion stands
    also where the engine fails: unused bytes are evicted later as any others, and an engine that is away comes back
    without the pins."""
    for digest in removal.digests:
        try:
            await services.engine.drop(digest)
        except ServingError as error:
            log.warning("drop_failed", digest=digest[:12], reason=error.message)
    for digest in removal.unpinned:
        try:
            await unpin_unused(services, digest)
        except LoraplexError as error:
            log.warning("unpin_failed", digest=digest[:12], reason=error.message)


async def delete_surplus(
    services: EngineAndCatalog, retention: Retention, info: VersionInfo, by: Actor
) -> None:
    """Delete the versions behind a new one that are not kept. A series' versions that requests run on stay. The new
    version stands, whatever becomes of older ones: the next one tries again."""
    tenant, name, run = info.tenant_id, info.name, services.database.run
    try:
        surplus = await run(retention.surplus, tenant, name)
        if surplus:
            try:
                in_use = {entry.ref.digest for entry in await services.engine.cache(surplus) if entry.leases}
            except EngineUnavailable:
                in_use = set()  # nothing runs on an engine that is away
            except ServingError:
                in_use = set(surplus)
            applied = partial(retention.apply, tenant, name, among=surplus, in_use=in_use, by=by)
            await evict_removed(services, await run(applied))
    except LoraplexError as error:
        log.warning("versions_not_deleted", adapter=name, tenant=tenant, reason=error.message)


async def unpin_unused(services: EngineAndCatalog, digest: str) -> None:
    """Unpin bytes in the engine, unless another version with the same bytes is pinned.
    Raises DatabaseUnavailable, DatabaseBusy, ServingError."""
    pinned = await services.database.run(services.catalog.pinned)
    if all(other.digest != digest for other in pinned):
        with contextlib.suppress(EngineUnavailable):
            await services.engine.unpin(digest)
