"""Marks versions corrupt in the catalog when the engine finds their bytes damaged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.db.database import Database
from loraplex.serving.engines.engines import Engines
from loraplex.serving.errors import ServingError

MAX_WAITING = 4096
log = structlog.get_logger("loraplex")


class DamageReports:
    """`put` takes digests on the event loop and never waits; `run` sees to them one by one, off it: the bytes are
    hashed once more, their versions marked, and dropped from the engine, pins included."""

    def __init__(self, database: Database, catalog: Catalog) -> None:
        self._database = database
        self._catalog = catalog
        self._waiting: dict[str, None] = {}
        self._arrived = asyncio.Event()

    def put(self, digests: Iterable[str]) -> None:
        """Excess reports are dropped: the next load that fails reports again."""
        for digest in digests:
            if len(self._waiting) < MAX_WAITING:
                self._waiting[digest] = None
        self._arrived.set()

    async def run(self, engine: Engines) -> None:
        """Until it is cancelled."""
        while True:
            while self._waiting:
                digest = next(iter(self._waiting))
                del self._waiting[digest]
                await self._see_to(digest, engine)
            self._arrived.clear()
            await self._arrived.wait()

    async def _see_to(self, digest: str, engine: Engines) -> None:
        try:
            damaged = await self._database.run(self._catalog.mark_damaged, digest)
        except Exception as error:
            expected = isinstance(error, LoraplexError)
            log.warning("damage_not_recorded", digest=digest, reason=str(error), exc_info=not expected)
            return
        if damaged:
            # Nothing asks for it any more; a pin would have it read over and over.
            with contextlib.suppress(ServingError):
                await engine.drop(digest)
