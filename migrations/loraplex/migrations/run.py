"""Bring a database to this version's schema, or back. Called at each start; nothing to do is quick."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from loraplex.adapters.store.files import make_private
from loraplex.migrations.errors import DatabaseTooNew


@dataclass(frozen=True, slots=True)
class SchemaState:
    """`server`: product and version. `found` is the database's schema, None where there is none."""

    server: str
    found: str | None
    newest: str


CONNECT_TIMEOUT_S = 10


def upgrade(url: str, revision: str = "head") -> list[str]:
    """Apply every migration up to `revision`, all or none; those that were. A SQLite file is its owner's alone from its
    first moment on. Raises DatabaseTooNew, SQLAlchemyError."""
    _keep_private(url)
    config = _config(url)
    command.upgrade(config, revision)
    return list(config.attributes["applied"])


def downgrade(url: str, revision: str) -> None:
    """Undo migrations down to `revision` ("base": all of them, and all data). Raises as `upgrade` does."""
    command.downgrade(_config(url), revision)


def examine_schema(url: str) -> SchemaState:
    """Without changing anything. Raises DatabaseTooNew, SQLAlchemyError."""
    newest = ScriptDirectory.from_config(_config(url)).get_current_head() or "none"
    on_sqlite = make_url(url).get_backend_name() == "sqlite"
    options = {} if on_sqlite else {"connect_timeout": CONNECT_TIMEOUT_S}
    engine = create_engine(url, poolclass=NullPool, connect_args=options)
    try:
        with engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
            version = ".".join(str(part) for part in connection.dialect.server_version_info or ())
    finally:
        engine.dispose()
    if found is not None:
        require_known_schema(found)
    return SchemaState(f"{'SQLite' if on_sqlite else 'PostgreSQL'} {version}", found, newest)


def require_known_schema(found: str) -> None:
    """Raises DatabaseTooNew where this version has no migration of that name."""
    script = ScriptDirectory.from_config(_config(""))
    try:
        script.get_revision(found)
    except CommandError as error:
        raise DatabaseTooNew(found, script.get_current_head() or "none") from error


def _keep_private(url: str) -> None:
    """SQLite makes the files beside a database (-wal, -shm, -journal) with its mode."""
    parsed = make_url(url)
    path = parsed.database or ""
    if parsed.get_backend_name() != "sqlite" or path in ("", ":memory:") or path.startswith("file:"):
        return
    # What cannot be made or belongs to another user is SQLite's to complain of, or works.
    with contextlib.suppress(OSError):
        make_private(Path(path))
    for suffix in ("-wal", "-shm", "-journal"):
        beside = Path(path + suffix)
        with contextlib.suppress(OSError):
            if beside.exists():
                make_private(beside)


def missing_migrations(found: str | None) -> list[str]:
    """Migrations that `upgrade` would apply to a database of the schema `found` (None: an empty one), in their
    order."""
    script = ScriptDirectory.from_config(_config(""))
    missing = script.iterate_revisions("head", found or "base")
    return [revision.revision for revision in missing][::-1]


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    # Not the ini option "sqlalchemy.url": a '%' in a password would be taken as an interpolation.
    config.attributes["url"] = url
    config.attributes["applied"] = []
    return config
