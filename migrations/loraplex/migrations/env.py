"""Alembic's entry: it runs this file by path for each command."""

from __future__ import annotations

from typing import Any

from alembic import context
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, make_url, pool, text

from loraplex.migrations.errors import DatabaseTooNew

_LOCK = {"space": 0x6C7078, "lock": 2}
_LOCK_TIMEOUT_S = 120


def run() -> None:
    """All migrations of a command in one transaction, on SQLite too: a process that is killed has changed
    nothing. Of several that start at once one migrates; the others wait for it, and find the work done."""
    attributes = context.config.attributes
    engine = _make_engine(attributes["url"])
    try:
        with engine.connect() as connection:
            context.configure(
                connection=connection,
                render_as_batch=True,
                transactional_ddl=True,
                on_version_apply=lambda step, **_: attributes["applied"].append(step.up_revision_id),
            )
            with context.begin_transaction():
                if engine.dialect.name == "postgresql":
                    connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'"))
                    connection.execute(text("SELECT pg_advisory_xact_lock(:space, :lock)"), _LOCK)
                _refuse_a_newer_schema()
                context.run_migrations()
    finally:
        engine.dispose()


def _refuse_a_newer_schema() -> None:
    for revision in context.get_context().get_current_heads():
        try:
            context.script.get_revision(revision)
        except (CommandError, ResolutionError) as error:
            raise DatabaseTooNew(revision, context.script.get_current_head() or "none") from error


def _make_engine(url: str) -> Engine:
    on_sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(
        url, poolclass=pool.NullPool, connect_args={} if on_sqlite else {"connect_timeout": 10}
    )
    if on_sqlite:
        _make_ddl_transactional(engine)
    return engine


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
