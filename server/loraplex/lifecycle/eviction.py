"""Evicts deleted adapters from the engine, and removes pins that no version has any more."""

from __future__ import annotations

import asyncio
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

AGAIN_S = 5.0
PAUSE_S = 0.5
"""The first request on a pushed version comes in this time, and many pushes where they are quick."""

log = structlog.get_logger("loraplex.admin")

_Name = tuple[str, str]
"""A tenant, and a name of its."""


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


async def unpin_unused(services: EngineAndCatalog, digest: str) -> None:
    """Unpin bytes in the engine, unless another version with the same bytes is pinned.
    Raises DatabaseUnavailable, DatabaseBusy, ServingError."""
    pinned = await services.database.run(services.catalog.pinned)
    if all(other.digest != digest for other in pinned):
        with contextlib.suppress(EngineUnavailable):
            await services.engine.unpin(digest)


class SurplusRemoval:
    """Deletes the versions of a name behind those that are kept, when it has a new one. Those of a series go `pause_s`
    seconds after the push that made them surplus, with those of the pushes since, and are asked for again every
    `again_s` seconds while requests run on them. Belongs to one event loop."""

    def __init__(
        self,
        *,
        database: Database,
        catalog: Catalog,
        engine: Engines,
        retention: Retention,
        again_s: float = AGAIN_S,
        pause_s: float = PAUSE_S,
    ) -> None:
        self.database = database
        self.catalog = catalog
        self.engine = engine
        self._retention = retention
        self._again_s = again_s
        self._pause_s = pause_s
        self._pushed: dict[_Name, tuple[VersionInfo, Actor]] = {}
        self._wakes: dict[_Name, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def after(self, info: VersionInfo, by: Actor) -> None:
        """The new version stands, whatever becomes of older ones: the next one tries again."""
        if info.checked is None:
            await self._remove(info, by)
            return
        name = info.tenant_id, info.name
        self._pushed[name] = info, by
        if name in self._wakes:
            self._wakes[name].set()
            return
        self._wakes[name] = asyncio.Event()
        task = asyncio.create_task(self._keep_removing(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what has not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_removing(self, name: _Name) -> None:
        wake = self._wakes[name]
        try:
            while True:
                await asyncio.sleep(self._pause_s)
                wake.clear()
                info, by = self._pushed[name]
                if not await self._remove(info, by) and not wake.is_set():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), self._again_s)
        finally:
            del self._wakes[name], self._pushed[name]

    async def _remove(self, info: VersionInfo, by: Actor) -> bool:
        """Whether versions stay because requests run on them, or because the engine does not say."""
        tenant, name, run = info.tenant_id, info.name, self.database.run
        try:
            surplus = await run(self._retention.surplus, tenant, name)
            if not surplus:
                return False
            try:
                in_use = {entry.ref.digest for entry in await self.engine.cache(surplus) if entry.leases}
            except EngineUnavailable:
                in_use = set()  # nothing runs on an engine that is away
            except ServingError:
                in_use = set(surplus)
            applied = partial(self._retention.apply, tenant, name, among=surplus, in_use=in_use, by=by)
            await evict_removed(self, await run(applied))
        except LoraplexError as error:
            log.warning("versions_not_deleted", adapter=name, tenant=tenant, reason=error.message)
            return False
        return bool(in_use) and info.checked is not None
