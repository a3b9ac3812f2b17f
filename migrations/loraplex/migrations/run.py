"""Bring a database to this version's schema, or back. Called at each start; nothing to do is quick."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config


def upgrade(url: str, revision: str = "head") -> list[str]:
    """Apply every migration up to `revision`, all or none; those that were. Raises DatabaseTooNew, SQLAlchemyError."""
    config = _config(url)
    command.upgrade(config, revision)
    return list(config.attributes["applied"])


def downgrade(url: str, revision: str) -> None:
    """Undo migrations down to `revision` ("base": all of them, and all data). Raises as `upgrade` does."""
    command.downgrade(_config(url), revision)


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    # Not the ini option "sqlalchemy.url": a '%' in a password would be taken as an interpolation.
    config.attributes["url"] = url
    config.attributes["applied"] = []
    return config
