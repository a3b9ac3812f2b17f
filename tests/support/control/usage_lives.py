"""Lives of a server as far as usage goes, and a database whose writes fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loraplex.control.db.database import Database
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.writer import UsageWriter
from support.control.usage import accepted, ended

SEGMENT = 64 << 10


class Flaky:
    """A database whose writes fail: before they commit, or after, when nobody hears of it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.failures: list[str] = []
        self.insert = database.insert
        self.read = database.read
        self.run = database.run

    @contextmanager
    def write(self, **options: Any) -> Iterator[Any]:
        failure = self.failures.pop() if self.failures else None
        if failure == "away":
            raise DatabaseUnavailable
        with self._database.write(**options) as session:
            yield session
            if failure == "broken":
                raise DatabaseUnavailable
        if failure == "unheard":
            raise DatabaseUnavailable


class Life:
    """One life of a server, as far as usage goes."""

    def __init__(self, directory: Path, database: Any, segment_bytes: int = SEGMENT) -> None:
        self.journal = UsageJournal(directory, segment_bytes=segment_bytes)
        self.writer = UsageWriter(database, directory, self.journal)

    def serve(self, count: int, **changes: Any) -> list[Ended]:
        return asyncio.run(self._serve(count, changes))

    async def _serve(self, count: int, changes: dict[str, Any]) -> list[Ended]:
        rows = []
        for start in range(0, count, 25):
            requests = [accepted(**changes) for _ in range(min(25, count - start))]
            for request in requests:
                self.journal.accept(request)
            rows += [ended(request) for request in requests]
            await asyncio.gather(*map(self.journal.end, rows[start:]))
        return rows

    def begin(self, **changes: Any) -> Accepted:
        request = accepted(**changes)
        self.journal.accept(request)
        return request

    def write(self) -> None:
        while self.writer.write_some():
            pass

    def try_to_write(self) -> None:
        with suppress(DatabaseUnavailable):
            self.write()

    def die(self) -> None:
        """What it had accepted and ended is in the system by then; the folder stays as it is."""
        self.journal.close()
        self.writer.forget()

    def stop(self) -> None:
        self.journal.close()
        self.writer.close()
