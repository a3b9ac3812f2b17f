"""One database for the control plane's rules: synchronous sessions, run in a bounded pool of threads."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

T = TypeVar("T")
MAX_THREADS = 8
MAX_LOOKUP_THREADS = 4
BUSY_TIMEOUT_S = 10
_WRITES = "loraplex_writes"


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """`read()` and `write()` give a session in one transaction each; `write()` commits on the way out.

    A SQLite writer takes the write lock at its beginning, so that two that read first and write then queue up
    instead of failing. `revision` grows with each committed write of this process: caches compare it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.revision = 0
        self._revision_lock = threading.Lock()
        self._engine = _make_engine(url)
        self._writer = self._engine.execution_options(**{_WRITES: True})
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._lookup_threads = anyio.CapacityLimiter(MAX_LOOKUP_THREADS)

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        with Session(self._writer, expire_on_commit=False) as session:
            with session.begin():
                yield session
            with self._revision_lock:
                self.revision += 1

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a rule of the control plane in a worker thread. It runs to its end even if the caller is gone."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._threads)

    async def look_up(self, function: Callable[..., T], *args: Any) -> T:
        """Like `run`, for readings that requests wait for: in threads of their own, because all of `run`'s may be
        queueing for the write lock, which readers do not need."""
        return await anyio.to_thread.run_sync(function, *args, limiter=self._lookup_threads)

    def close(self) -> None:
        self._engine.dispose()


def _make_engine(url: str) -> Engine:
    engine = create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    if make_url(url).get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver's own idea of when a transaction begins would come too late for a writer.
    connection.isolation_level = None
    for pragma in (f"busy_timeout={BUSY_TIMEOUT_S * 1000}", "synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")
    _use_wal(connection)


def _use_wal(connection: Any) -> None:
    """A new file is changed to WAL by its first connection. While another one is about to write, SQLite refuses that
    at once, whatever the time-out."""
    last_try = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > last_try:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
