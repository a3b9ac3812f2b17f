"""Alembic's entry: it runs this file by path for each command."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, pool


def run() -> None:
    engine = create_engine(context.config.attributes["url"], poolclass=pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, render_as_batch=True, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


run()
