"""When keys were last used: noted in memory on the way of a request, written in batches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import structlog
from sqlalchemy import bindparam, or_, update

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.tables import ApiKey

FLUSH_INTERVAL_S = 30.0
MAX_KEYS = 100_000
MAX_ROWS = 500
_SET_LATER = (
    update(ApiKey)
    .where(
        ApiKey.id == bindparam("key"),
        or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < bindparam("moment")),
    )
    .values(last_used_at=bindparam("moment"))
)
log = structlog.get_logger("loraplex")


class KeyUse:
    """`note` costs the event loop a dictionary's entry; `flush` runs in a worker thread. What could not be written is
    kept for the next time; a server that is killed loses at most what it noted since the last."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[str, float] = {}

    def note(self, key_id: str) -> None:
        with self._lock:
            if key_id in self._used or len(self._used) < MAX_KEYS:
                self._used[key_id] = self._clock()

    @property
    def num_pending(self) -> int:
        return len(self._used)

    def flush(self) -> int:
        """Write what was noted; how many keys. Their times are the database's: its own, less how long ago the use
        was. A later use that another server wrote stands. Raises DatabaseUnavailable, DatabaseBusy."""
        with self._lock:
            batch, self._used = list(self._used.items()), {}
        written = 0
        try:
            for start in range(0, len(batch), MAX_ROWS):
                self._write(batch[start : start + MAX_ROWS])
                written += len(batch[start : start + MAX_ROWS])
        finally:
            with self._lock:
                self._used = dict(batch[written:]) | self._used
        return written

    def _write(self, used: list[tuple[str, float]]) -> None:
        with self._database.write(ages_caches=False) as session:
            now, at = database_now(session), self._clock()
            rows = [
                {"key": key_id, "moment": now - timedelta(seconds=max(0.0, at - used_at))}
                for key_id, used_at in used
            ]
            session.connection().execute(_SET_LATER, rows)

    async def run(self, *, interval_s: float = FLUSH_INTERVAL_S) -> None:
        """Flush every so often until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self._try()
        finally:
            await asyncio.shield(self._try())

    async def _try(self) -> None:
        try:
            await self._database.run(self.flush)
        except LoraplexError as error:
            log.warning("key_use_not_written", keys=self.num_pending, reason=error.message)
