"""Connections to PostgreSQL that never hang."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from sqlalchemy import URL, Connection, Engine, create_engine, event

from loraplex.control.db.postgres import PATIENCE, PING_TIMEOUT_S, STATEMENT_TIMEOUT_S

T = TypeVar("T")
CONNECT_TIMEOUT_S = 2
LOCK_TIMEOUT_S = 10
POOL_TIMEOUT_S = 5
POOL_SIZE = 16
POOL_OVERFLOW = 8


class BoundedConnection(psycopg.Connection[Any]):
    """Gives up where the server does not answer. PostgreSQL's own `statement_timeout` is kept by the server, and TCP
    notices no peer that takes bytes and never answers: both leave a thread waiting without end."""

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
    patience = connection.get_execution_options().get(PATIENCE)
    bounded = connection.connection.driver_connection
    if patience is not None and isinstance(bounded, BoundedConnection):
        bounded.patience_s = patience


def _checkin(bounded: Any, _record: object) -> None:
    if isinstance(bounded, BoundedConnection):
        bounded.patience_s = PING_TIMEOUT_S
