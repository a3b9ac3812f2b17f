"""SQLite settings: WAL, waiting for the write lock, and transactions that begin where ours do."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event

BUSY_TIMEOUT_S = 10
WRITES = "loraplex_writes"
"""Execution option of a writer's connection: it takes the write lock at its beginning."""


def make_sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url)
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    # The driver's own idea of when a transaction begins would come too late for a writer.
    connection.isolation_level = None
    for pragma in (f"busy_timeout={int(BUSY_TIMEOUT_S * 1000)}", "synchronous=FULL", "foreign_keys=ON"):
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


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
