"""The database's clock: the one that all servers on a database share, and that decides when a key ends."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.expression import ColumnElement

from loraplex.control.db.tables import UtcDateTime


class DatabaseNow(ColumnElement[datetime]):
    """The time at which the statement runs, in UTC; to the microsecond on PostgreSQL, to the millisecond on SQLite."""

    inherit_cache = True
    type = UtcDateTime()


@compiles(DatabaseNow, "postgresql")
def _on_postgresql(*_: Any, **__: Any) -> str:
    return "clock_timestamp()"


@compiles(DatabaseNow, "sqlite")
def _on_sqlite(*_: Any, **__: Any) -> str:
    return "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def database_now(session: Session) -> datetime:
    return session.scalars(select(DatabaseNow())).one()
