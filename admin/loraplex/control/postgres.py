"""What PostgreSQL needs that SQLite does not: connections that never hang, one writer at a time, locks by name."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

T = TypeVar("T")
CONNECT_TIMEOUT_S = 2
PING_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 15
LOCK_TIMEOUT_S = 10
POOL_TIMEOUT_S = 5
POOL_SIZE = 16
POOL_OVERFLOW = 8
_PATIENCE = "loraplex_patience_s"
"""Execution option: how long a statement of the transaction may take."""
READS: dict[str, Any] = {
    "isolation_level": "REPEATABLE READ",
    "postgresql_readonly": True,
    _PATIENCE: READ_TIMEOUT_S,
}
"""Execution options of a reader: one snapshot for all of its statements, as SQLite gives it."""
REPORTS: dict[str, Any] = READS | {_PATIENCE: STATEMENT_TIMEOUT_S + PING_TIMEOUT_S}
"""Of a reader that sums up much: the server itself ends it first."""
WRITES: dict[str, Any] = {
    "isolation_level": "READ COMMITTED",
    _PATIENCE: STATEMENT_TIMEOUT_S + PING_TIMEOUT_S,
}
_WRITER_LOCK = {"space": 0x6C7078, "lock": 1}


class BoundedConnection(psycopg.Connection[Any]):
    """Gives up where the server does not answer. PostgreSQL's own `statement_timeout` is kept by the server, and TCP
    notices no peer that takes bytes and never answers: both leave a thread waiting for ever."""

    patience_s: float = PING_TIMEOUT_S

    def wait(self, gen: PQGen[T], *args: Any, **options: Any) -> T:
        return super().wait(self._until(gen, time.monotonic() + self.patience_s), *args, **options)

    def _until(self, gen: PQGen[T], end: float) -> Generator[Any, Any, T]:
        """`gen`, asked at each of the driver's own wake-ups (every 0.1 s) whether it is too late."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > end:
                    self.close()
                    raise psycopg.OperationalError(f"no answer within {self.patience_s:g} s")
                wanted = gen.send(ready)
        except StopIteration as stop:
            result: T = stop.value
            return result


def make_postgres_engine(url: URL) -> Engine:
    """Connections are tried before they are used, and every wait has an end: for a connection, a lock, an answer."""
    settings = {
        "statement_timeout": STATEMENT_TIMEOUT_S * 1000,
        "lock_timeout": int(LOCK_TIMEOUT_S * 1000),
        "idle_in_transaction_session_timeout": 60_000,
        "timezone": "UTC",
    }
    given = str(url.query.get("options", ""))
    options = " ".join([f"-c {name}={value}" for name, value in settings.items()] + [given]).strip()
    engine = create_engine(
        url.difference_update_query(["options"]),
        pool_pre_ping=True,
        pool_size=POOL_SIZE,
        max_overflow=POOL_OVERFLOW,
        pool_timeout=POOL_TIMEOUT_S,
        connect_args={
            "connect_timeout": CONNECT_TIMEOUT_S,
            "options": options,
            "application_name": "loraplex",
            "tcp_user_timeout": 10_000,
        },
    )
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "begin", _begin)
    event.listen(engine, "checkin", _checkin)
    return engine


def _connect(
    _dialect: object, _record: object, args: list[Any], options: dict[str, Any]
) -> BoundedConnection:
    return BoundedConnection.connect(*args, **options)


def _begin(connection: Connection) -> None:
    patience = connection.get_execution_options().get(_PATIENCE)
    bounded = connection.connection.driver_connection
    if patience is not None and isinstance(bounded, BoundedConnection):
        bounded.patience_s = patience


def _checkin(bounded: Any, _record: object) -> None:
    if isinstance(bounded, BoundedConnection):
        bounded.patience_s = PING_TIMEOUT_S


def lock_writers(connection: Connection) -> None:
    """Until the end of this transaction nobody else writes. Called before its first statement, so that whatever it
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
