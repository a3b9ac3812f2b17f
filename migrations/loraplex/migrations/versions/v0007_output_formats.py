"""How each version writes calls of tools and reasoning; null: as the base model does."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_COLUMNS = (sa.Column("tool_format", sa.String(16)), sa.Column("reasoning_format", sa.String(16)))


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("adapter_versions", column.copy())


def downgrade() -> None:
    with op.batch_alter_table("adapter_versions") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
