"""The threshold of a series for the agreement with its trainer, and the numbers that a version waits to be held to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("adapter_series", sa.Column("agree_within", sa.Double()))
    op.add_column("adapter_versions", sa.Column("pending_agreement", sa.JSON()))


def downgrade() -> None:
    # The server before would let a version serve whose trainer's numbers were never compared.
    op.execute(
        "UPDATE adapter_versions SET state = 'deleted', pending_check = NULL, pinned = false "
        "WHERE pending_agreement IS NOT NULL AND pending_check IS NOT NULL"
    )
    with op.batch_alter_table("adapter_versions") as table:
        table.drop_column("pending_agreement")
    with op.batch_alter_table("adapter_series") as table:
        table.drop_column("agree_within")
