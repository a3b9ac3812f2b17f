"""PostgreSQL, beyond what SQLite needs: time-outs, one writer at a time, named locks. Its connections
are in `postgres_engine`: the driver is for those that use it to import."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

PING_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 15
PATIENCE = "loraplex_patience_s"
"""Execution option: how long a statement of the transaction may take."""
READS: dict[str, Any] = {
    "isolation_level": "REPEATABLE READ",
    "postgresql_readonly": True,
    PATIENCE: READ_TIMEOUT_S,
}
"""Execution options of a reader: one snapshot for all of its statements, as SQLite gives it."""
REPORTS: dict[str, Any] = READS | {PATIENCE: STATEMENT_TIMEOUT_S + PING_TIMEOUT_S}
"""Settings of a reader that sums up much: the database server ends it first."""
WRITES: dict[str, Any] = {
    "isolation_level": "READ COMMITTED",
    PATIENCE: STATEMENT_TIMEOUT_S + PING_TIMEOUT_S,
}
_WRITER_LOCK = {"space": 0x6C7078, "lock": 1}


def lock_writers(connection: Connection) -> None:
    """Until the end of this transaction no other one writes. Called before its first statement, so that whatever it
    reads is what the writers before it left."""
    connection.execute(text("SELECT pg_advisory_xact_lock(:space, :lock)"), _WRITER_LOCK)


@contextlib.contextmanager
def named_lock(engine: Engine, name: str) -> Iterator[None]:
    """Held by one at a time of all servers on this database. It is lost with its connection."""
    key = {"key": int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)}
    with engine.connect().execution_options(**WRITES | {"isolation_level": "AUTOCOMMIT"}) as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), key)
        try:
            yield
        finally:
            try:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)
            except DBAPIError:
                connection.invalidate()
