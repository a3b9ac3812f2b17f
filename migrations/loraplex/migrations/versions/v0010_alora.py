"""Activated LoRA: the invocation of each version, and what it does with a prompt without it; null: none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_COLUMNS = (sa.Column("alora", sa.String(8)), sa.Column("invocation", sa.JSON()))


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("adapter_versions", column.copy())


def downgrade() -> None:
    # The server before reads the config of such a version when it loads it, and refuses it.
    with op.batch_alter_table("adapter_versions") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
