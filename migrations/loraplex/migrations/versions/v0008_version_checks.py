"""Versions whose numbers have not been checked; null: they need no check. What was ready before stays so."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_INDEX = "ix_adapter_versions_validating"
_VALIDATING = sa.text("state = 'validating'")


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("adapter_versions", sa.Column("pending_check", sa.JSON()))
    op.create_index(
        _INDEX,
        "adapter_versions",
        ["created_at"],
        sqlite_where=_VALIDATING,
        postgresql_where=_VALIDATING,
    )


def downgrade() -> None:
    # The version before knows neither state: what was not checked is ready there, and what was refused is deleted.
    op.execute("UPDATE adapter_versions SET state = 'ready' WHERE state = 'validating'")
    op.execute("UPDATE adapter_versions SET state = 'deleted' WHERE state = 'rejected'")
    op.drop_index(_INDEX, "adapter_versions")
    with op.batch_alter_table("adapter_versions") as table:
        table.drop_column("pending_check")
