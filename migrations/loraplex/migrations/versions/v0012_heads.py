"""Pooled outputs of versions: the head of one, and the vectors that it was trained for; null: none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_COLUMNS = (sa.Column("head", sa.JSON()), sa.Column("embedding", sa.JSON()))


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("adapter_versions", column.copy())


def downgrade() -> None:
    # The server before reads the config of a version with a head when it loads it, and refuses it.
    with op.batch_alter_table("adapter_versions") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
