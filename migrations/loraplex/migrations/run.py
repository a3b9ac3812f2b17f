"""Bring a database to this version's schema, or back. Called at each start; nothing to do is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import create_engine, make_url
from sqlalchemy.pool import NullPool

from loraplex.migrations.errors import DatabaseTooNew


@dataclass(frozen=True, slots=True)
class SchemaState:
    """`server`: product and version. `found` is the database's schema, None where there is none."""

    server: str
    found: str | None
    newest: str


CONNECT_TIMEOUT_S = 10


def upgrade(url: str, revision: str = "head") -> list[str]:
    """Apply every migration up to `revision`, all or none; those that were. Raises DatabaseTooNew, SQLAlchemyError."""
    config = _config(url)
    command.upgrade(config, revision)
    return list(config.attributes["applied"])


def downgrade(url: str, revision: str) -> None:
    """Undo migrations down to `revision` ("base": all of them, and all data). Raises as `upgrade` does."""
    command.downgrade(_config(url), revision)


def examine_schema(url: str) -> SchemaState:
    """Without changing anything. Raises DatabaseTooNew, SQLAlchemyError."""
    script = ScriptDirectory.from_config(_config(url))
    newest = script.get_current_head() or "none"
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
        try:
            script.get_revision(found)
        except CommandError as error:
            raise DatabaseTooNew(found, newest) from error
    return SchemaState(f"{'SQLite' if on_sqlite else 'PostgreSQL'} {version}", found, newest)


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    # Not the ini option "sqlalchemy.url": a '%' in a password would be taken as an interpolation.
    config.attributes["url"] = url
    config.attributes["applied"] = []
    return config
