"""One database for the control plane's rules: synchronous sessions, run in a bounded pool of threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import structlog
from sqlalchemy import Engine, event, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, UOWTransaction

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db import postgres, sqlite
from loraplex.control.db.failures import meaning_of
from loraplex.control.db.outage import Outage
from loraplex.control.db.tables import Base
from loraplex.control.errors import DatabaseDenied, DatabaseUnavailable

T = TypeVar("T")
log = structlog.get_logger("loraplex")
DENIED_TOLD_EVERY_S = 60.0
MAX_THREADS = 8
MAX_LOOKUP_THREADS = 4
MAX_SUBJECTS = 100_000
CHECK_INTERVAL_S = 5.0
_SUBJECTS = "loraplex.subjects"


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """`read()` and `write()` give a session in one transaction each; `write()` commits on the way out.

    A reader sees one state of the database, however many statements it has. Writers queue up: on SQLite for its
    write lock, on PostgreSQL, where they may be of several servers, for an advisory lock. So what a writer has read
    still holds when it commits. `revision` grows with each committed write of this process: caches compare it.

    Both raise DatabaseUnavailable while the database cannot be reached, at once from the second caller on;
    DatabaseBusy where a turn did not come in time; Conflict where a constraint is violated.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.revision = 0
        self._changes_lock = threading.Lock()
        self._denied_quiet_until = 0.0
        self._changed: OrderedDict[str, int] = OrderedDict()
        self._all_changed = 0
        self._engine = _make_engine(url)
        self.on_postgres = self._engine.dialect.name == "postgresql"
        reads, writes = (postgres.READS, postgres.WRITES) if self.on_postgres else ({}, {sqlite.WRITES: True})
        self._reader = self._engine.execution_options(**reads)
        reports = postgres.REPORTS if self.on_postgres else {}
        self._reporter = self._engine.execution_options(**reports)
        self._writer = self._engine.execution_options(**writes)
        self.outage = Outage(self._probe)
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._lookup_threads = anyio.CapacityLimiter(MAX_LOOKUP_THREADS)

    @contextmanager
    def read(self, *, report: bool = False) -> Iterator[Session]:
        """A `report` may take as long as a writer: what takes longer is DatabaseBusy, and no sign of an outage."""
        reader = self._reporter if report else self._reader
        with self._failures_named(), Session(reader) as session:
            yield session

    @contextmanager
    def write(self, *, ages_caches: bool = True, in_turn: bool = True) -> Iterator[Session]:
        """With `ages_caches` False for what no cache holds; with `in_turn` False for what is decided by nothing that
        was read: on PostgreSQL it does not queue up with the other writers."""
        with self._failures_named(), Session(self._writer, expire_on_commit=False) as session:
            event.listen(session, "after_flush", _note_rows)
            with session.begin():
                connection = session.connection()
                if self.on_postgres and in_turn:
                    postgres.lock_writers(connection)
                yield session
            if ages_caches:
                self._note(session.info.get(_SUBJECTS, ()))

    def insert(self, table: type[Base]) -> postgresql.Insert | sqlite_dialect.Insert:
        """The database's own INSERT, which can say what happens where a row is there already."""
        return postgresql.insert(table) if self.on_postgres else sqlite_dialect.insert(table)

    def lock(self, name: str) -> AbstractContextManager[None]:
        """Held by one server at a time of all on this database; within a server the caller keeps order. A SQLite
        file has one server."""
        return self._named_lock(name) if self.on_postgres else nullcontext()

    def changed_since(self, subject: str, revision: int) -> bool:
        """Whether this process committed a change of `subject` after `revision`."""
        with self._changes_lock:
            return self._changed.get(subject, self._all_changed) > revision

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a rule of the control plane in a worker thread. It runs to its end even if the caller is gone."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)

    async def look_up(self, function: Callable[..., T], *args: Any) -> T:
        """Like `run`, for readings that requests wait for: in threads of their own, because all of `run`'s may be
        queueing for the write lock, which readers do not need."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._lookup_threads)

    def check(self) -> None:
        """One round trip. Raises DatabaseUnavailable, DatabaseBusy."""
        with self._failures_named():
            self._probe()

    async def watch(self, *, interval_s: float = CHECK_INTERVAL_S) -> None:
        """Probe the database also without requests; until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(LoraplexError):
                await self.run(self.check)

    def close(self) -> None:
        self.outage.close()
        self._engine.dispose()

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        self.outage.check()
        try:
            yield
        except SQLAlchemyError as error:
            meaning = meaning_of(error)
            if meaning is None:
                raise
            if isinstance(meaning, DatabaseUnavailable):
                self.outage.report_lost(_reason(error))
            elif isinstance(meaning, DatabaseDenied):
                self._tell_denied(error)
            raise meaning from error

    def _tell_denied(self, error: SQLAlchemyError) -> None:
        """Once a minute: it may be every request's."""
        if time.monotonic() < self._denied_quiet_until:
            return
        self._denied_quiet_until = time.monotonic() + DENIED_TOLD_EVERY_S
        statement = getattr(error, "statement", None) or ""
        log.error("database_denied", statement=statement.partition(" ")[0], reason=_reason(error))

    @contextmanager
    def _named_lock(self, name: str) -> Iterator[None]:
        with self._failures_named(), postgres.named_lock(self._engine, name):
            yield

    def _note(self, subjects: Iterable[str]) -> None:
        with self._changes_lock:
            self.revision += 1
            for subject in subjects:
                self._changed[subject] = self.revision
                self._changed.move_to_end(subject)
            while len(self._changed) > MAX_SUBJECTS:
                # What is not remembered one by one counts as changed with the youngest that was forgotten.
                _, self._all_changed = self._changed.popitem(last=False)

    def _probe(self) -> None:
        with self._reader.connect() as connection:
            connection.execute(text("SELECT 1"))


def note_change(session: Session, *subjects: str) -> None:
    """Within a `write()`: what is remembered of these is not to be served any more, however unreachable the database
    may be by then."""
    session.info.setdefault(_SUBJECTS, set()).update(subjects)


def _note_rows(session: Session, _: UOWTransaction) -> None:
    """A change of a row is a change of its subjects, in every writer."""
    for row in (*session.new, *session.dirty, *session.deleted):
        note_change(session, *row.subjects)


def _reason(error: SQLAlchemyError) -> str:
    """The driver's first line. It names hosts and users, and no password."""
    return (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0][:200]


def _make_engine(url: str) -> Engine:
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        # With the driver, which SQLite has no use for.
        from loraplex.control.db.postgres_engine import make_postgres_engine

        return make_postgres_engine(parsed)
    return sqlite.make_sqlite_engine(parsed)
