"""The chosen database: its URL, its schema, and what may be said of it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from alembic.util import CommandError
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.data_dir_lock import make_data_dir
from loraplex.app.storage.disk import full_data_dir
from loraplex.migrations.run import examine_schema, missing_migrations, upgrade

_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


def database_url(settings: Settings) -> str:
    """The chosen database, SQLite in the data directory by default. It may hold a password: see `shown_database`.
    Raises SettingsInvalid."""
    if not settings.database_url:
        make_data_dir(settings.data_dir)
        return f"sqlite:///{settings.data_dir.resolve() / 'loraplex.db'}"
    return _read(settings.database_url).render_as_string(hide_password=False)


def shown_database(url: str) -> str:
    """Without user, password and options."""
    parsed = make_url(url)
    where = parsed.host or str(parsed.query.get("host", "")) or "local socket"
    port = "" if parsed.port is None else f":{parsed.port}"
    if parsed.get_backend_name() == "sqlite":
        return f"sqlite:///{parsed.database or ''}"
    return f"postgresql://{where}{port}/{parsed.database or ''}"


def upgrade_database(settings: Settings) -> tuple[str, list[str]]:
    """Bring the chosen database to this version's schema; its URL and the migrations that were made. Raises
    SettingsInvalid, DatabaseTooNew."""
    url = database_url(settings)
    try:
        return url, upgrade(url)
    except (SQLAlchemyError, CommandError, ModuleNotFoundError) as error:
        remedy = "Mend it, restore it from a backup, or give another with --database-url."
        told = full_data_dir(error, settings) or f"{_reason(error)}. {remedy}"
        raise SettingsInvalid(f"the database {shown_database(url)} cannot be used: {told}") from error


def existing_database(settings: Settings) -> tuple[str, bool]:
    """The chosen database's URL and whether it is there, without making anything. Raises SettingsInvalid."""
    if settings.database_url:
        url = database_url(settings)
    else:
        url = f"sqlite:///{settings.data_dir.resolve() / 'loraplex.db'}"
    parsed = make_url(url)
    return url, parsed.get_backend_name() != "sqlite" or Path(parsed.database or "").is_file()


def require_database_directory(settings: Settings) -> None:
    """Raises SettingsInvalid for an SQLite database whose directory is not there: a mistyped one."""
    parsed = make_url(existing_database(settings)[0])
    if parsed.get_backend_name() != "sqlite":
        return
    directory = Path(parsed.database or "").parent
    if not directory.is_dir():
        raise SettingsInvalid(
            f"there is no directory {directory} for a database; give the server's --data-dir or --database-url."
        )


def pending_migrations(settings: Settings) -> tuple[str, list[str]]:
    """The chosen database and the migrations that `upgrade_database` would make, without changing or making anything.
    Raises SettingsInvalid, DatabaseTooNew."""
    url, is_there = existing_database(settings)
    if not is_there:
        return url, missing_migrations(None)
    try:
        return url, missing_migrations(examine_schema(url).found)
    except SQLAlchemyError as error:
        raise SettingsInvalid(
            f"the database {shown_database(url)} cannot be read: {_reason(error)}."
        ) from error


def describe_database(settings: Settings) -> str:
    """Product, place and schema, without changing anything. Raises SettingsInvalid, DatabaseTooNew."""
    if not settings.database_url:
        return f"SQLite {sqlite3.sqlite_version} in the data directory"
    url = database_url(settings)
    try:
        state = examine_schema(url)
    except SQLAlchemyError as error:
        raise SettingsInvalid(f"{shown_database(url)} cannot be used: {_reason(error)}") from error
    schema = "no schema yet" if state.found is None else f"schema {state.found}"
    return f"{state.server} at {shown_database(url)}, {schema}, this version's is {state.newest}"


def _reason(error: Exception) -> str:
    """The driver's first line."""
    return (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0].rstrip(".")


def _read(given: str) -> URL:
    parsed: URL | None = None
    with contextlib.suppress(ArgumentError, ValueError):
        parsed = make_url(given)
    driver = None if parsed is None else _DRIVERS.get(parsed.drivername)
    if parsed is None or driver is None or not parsed.database:
        # What was given is not repeated: it may hold a password.
        raise SettingsInvalid(
            "--database-url: give sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME, with what is special in "
            "USER and PASSWORD percent-encoded; leave it out for SQLite in the data directory."
        )
    return parsed.set(drivername=driver)
