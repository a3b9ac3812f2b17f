"""Requests of watched releases that run on this server now, for the guard: one that never ends has no outcome.

Counts are in memory, and a task writes them into the database each second. The guard takes no row of more than a few
seconds: a server that died tells nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import delete
from sqlalchemy.orm import Session

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import RunningArmRow
from loraplex.control.usage.outcome_inbox import watched_arms
from loraplex.control.usage.records import Accepted

EVERY_S = 1.0
MAX_OLDEST = 64
"""Longest running requests of an arm that are named."""
log = structlog.get_logger("loraplex")


class RunningArms:
    """`begin` and `end` for each request of a watched release, on the event loop."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, int], dict[str, tuple[int, float]]] = {}

    def begin(self, request: Accepted) -> None:
        arm = (request.tenant_id, request.adapter, request.version)
        self._requests.setdefault(arm, {})[request.id] = (request.key_hash, request.at.timestamp())

    def end(self, request: Accepted) -> None:
        """Does nothing for one that did not begin here."""
        arm = (request.tenant_id, request.adapter, request.version)
        requests = self._requests.get(arm, {})
        requests.pop(request.id, None)
        if not requests:
            self._requests.pop(arm, None)

    def rows(self) -> list[dict[str, Any]]:
        """The columns of `RunningArmRow` for each arm, without the server and the time."""
        return [
            {
                "tenant_id": tenant_id,
                "name": name,
                "version": version,
                "count": len(requests),
                "oldest": [list(pair) for pair in islice(requests.values(), MAX_OLDEST)],
            }
            for (tenant_id, name, version), requests in self._requests.items()
        ]


class RunningArmsWriter:
    """Writes what runs on this server. `server_id` is unique among all servers and their lives."""

    def __init__(self, database: Database, arms: RunningArms, server_id: str) -> None:
        self._database = database
        self._arms = arms
        self._server_id = server_id
        self._has_rows = False

    async def run(self) -> None:
        """Until cancelled; then the rows are removed, if the database answers."""
        try:
            while True:
                await self.write_once()
                await asyncio.sleep(EVERY_S)
        finally:
            await asyncio.shield(self._try_to_write(()))

    async def write_once(self) -> None:
        """Replace the rows. Without requests that run now, and without rows, the database is not asked."""
        await self._try_to_write(self._arms.rows())

    async def _try_to_write(self, rows: Sequence[dict[str, Any]]) -> None:
        if rows or self._has_rows:
            try:
                await self._database.run(self._write, rows)
            except LoraplexError as error:  # rows that are not renewed count for nothing
                log.debug("running_arms_not_written", reason=error.message)

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        self._has_rows = True  # if the commit is not heard of too
        with self._database.write(ages_caches=False, in_turn=False) as session:
            session.execute(delete(RunningArmRow).where(RunningArmRow.server_id == self._server_id))
            watched = self._watched(session, rows)
            if watched:
                found = {"server_id": self._server_id, "at": database_now(session)}
                session.execute(self._database.insert(RunningArmRow), [row | found for row in watched])
        self._has_rows = bool(watched)

    @staticmethod
    def _watched(session: Session, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those whose release has not ended since they began."""
        arms = watched_arms(session, ((row["tenant_id"], row["name"]) for row in rows))
        return [row for row in rows if row["version"] in arms.get((row["tenant_id"], row["name"]), ())]
