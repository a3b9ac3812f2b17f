"""Brings the adapters that are likely to be asked for back into memory after a start, and records which those are."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from loraplex.adapters.cache.tenant_memory import MemoryLimits
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.all_versions import find_ready
from loraplex.control.catalog.releases import Releases
from loraplex.control.db.database import Database
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import VersionInfo
from loraplex.lifecycle.demand_file import Recorded, read_demand, write_demand
from loraplex.lifecycle.tenant_terms import TermsSender
from loraplex.serving.demand import Demand, Uses, rank
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import EngineUnavailable

SAVE_INTERVAL_S = 60.0
MAX_RELEASES = 256
"""Versions released last that a start loads behind those in demand, as far as there is room."""
log = structlog.get_logger("loraplex")


class Warming:
    """`pin` before requests are taken, `begin` when they are; `run` records the demand meanwhile. `folder` has the
    file: see `demand_file`."""

    def __init__(
        self,
        folder: Path,
        demand: Demand,
        *,
        database: Database,
        catalog: Catalog,
        releases: Releases,
        tenants: Tenants,
    ) -> None:
        self._folder = folder
        self._demand = demand
        self._database = database
        self._catalog = catalog
        self._releases = releases
        self._terms = TermsSender(database, tenants)
        self._is_restored = False  # until then the file knows more
        self._num_saved = 0

    async def pin(self, engine: Engines) -> None:
        """The engine begins without pins: send it the catalog's, and wait for them for some seconds. A pinned version
        that does not come is logged, and comes later if it can. Raises DatabaseUnavailable, DatabaseBusy."""
        pinned = await self._database.run(self._catalog.pinned)
        await self._terms.tell(engine, {version.tenant_id for version in pinned})
        for version in pinned:
            try:
                await engine.pin(version.ref())
            except LoraplexError as error:
                log.warning("pin_failed", adapter=f"{version.name}@{version.version}", reason=error.message)
        if not pinned:
            return
        try:
            missing = await engine.wait_pins([version.ref() for version in pinned])
        except EngineUnavailable:
            return  # its next life has the pins
        for entry in missing:
            reason = entry.error or "it is not loaded yet, or waits for memory"
            log.warning("pin_not_loaded", adapter=f"{entry.ref.name}@v{entry.ref.version}", reason=reason)

    async def begin(self, engine: Engines) -> None:
        """Have the engine load the versions in demand, as far as they are there and ready, and behind them the latest
        releases. Without the database nothing is loaded, and the file stays as it is."""
        try:
            await self._begin(engine)
        except LoraplexError as error:
            log.warning("warming_failed", reason=error.message)

    async def _begin(self, engine: Engines) -> None:
        try:
            recorded = await asyncio.to_thread(read_demand, self._folder)
        except LoraplexError as error:
            log.warning("demand_not_read", reason=error.message)
            recorded = []
        run = self._database.run
        ready = await run(find_ready, self._database, {each.digest: each.tenant_id for each in recorded})
        terms = await self._terms.tell(engine, {version.tenant_id for version in ready.values()})
        self._demand.restore(
            Uses(ready[r.digest].ref(), r.uses) for r in reversed(recorded) if r.digest in ready
        )
        self._is_restored = True
        wanted = in_order(recorded, ready, {tenant: its.memory for tenant, its in terms.items()})
        newest = await run(self._releases.serving, await run(self._releases.newest, MAX_RELEASES))
        refs = {
            ref.digest: ref for ref in (*newest, *wanted)
        }  # a version's own tenant, where it was recorded
        order = dict.fromkeys(ref.digest for ref in (*wanted, *newest))
        if order:
            log.info("warming", num_versions=len(order))
            engine.warm([refs[digest] for digest in order])

    async def run(self, *, interval_s: float = SAVE_INTERVAL_S) -> None:
        """Record the demand every so often until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self._save()
        finally:
            await asyncio.shield(self._save())

    async def _save(self) -> None:
        changes = self._demand.num_changes
        if not self._is_restored or changes == self._num_saved:
            return
        try:
            known = self._demand.known()
            await asyncio.to_thread(lambda: write_demand(self._folder, rank(known, time.time())))
        except OSError as error:
            log.warning("demand_not_written", reason=str(error))
        else:
            self._num_saved = changes


def in_order(
    recorded: list[Recorded], ready: dict[str, VersionInfo], limits: dict[str, MemoryLimits]
) -> list[AdapterRef]:
    """Versions by demand; those that fill a tenant's reservation of device memory come before others. A version's size
    in memory is not known yet: that of its files stands in."""
    left = {tenant: its.device_bytes_reserved or 0 for tenant, its in limits.items()}
    reserved: list[AdapterRef] = []
    rest: list[AdapterRef] = []
    for each in recorded:
        version = ready.get(each.digest)
        if version is None:
            continue
        room = left.get(version.tenant_id, 0)
        (reserved if 0 < version.bytes <= room else rest).append(version.ref())
        if version.bytes <= room:
            left[version.tenant_id] = room - version.bytes
    return [*reserved, *rest]
