"""Alembic's entry: it runs this file by path for each command."""

from __future__ import annotations

from typing import Any

from alembic import context
from sqlalchemy import Connection, Engine, create_engine, event, pool


def run() -> None:
    """All migrations of a command in one transaction, on SQLite too: whoever is killed has changed nothing."""
    engine = create_engine(context.config.attributes["url"], poolclass=pool.NullPool)
    if engine.dialect.name == "sqlite":
        _make_ddl_transactional(engine)
    with engine.connect() as connection:
        context.configure(connection=connection, render_as_batch=True, transactional_ddl=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


def _make_ddl_transactional(engine: Engine) -> None:
    """The driver would begin a transaction only at the first INSERT, and so commit each CREATE TABLE by itself.
    BEGIN IMMEDIATE makes a second process that migrates wait, and find the work done."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout=30000")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


run()
