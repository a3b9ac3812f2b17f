"""Chat files that versions bring beyond their base's; null: none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COLUMNS = (sa.Column("chat_digest", sa.String(64)), sa.Column("chat", sa.JSON()))


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("adapter_versions", column.copy())


def downgrade() -> None:
    # The version before renders every chat with the base's template.
    with op.batch_alter_table("adapter_versions") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
