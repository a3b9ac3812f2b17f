"""Whether the bytes of a version are on the disk: a push to a series serves before they are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column(
        "adapter_versions", sa.Column("durable", sa.Boolean(), nullable=False, server_default=sa.true())
    )


def downgrade() -> None:
    # The server before does not know the state: what was lost is deleted there.
    op.execute("UPDATE adapter_versions SET state = 'deleted' WHERE state = 'lost'")
    with op.batch_alter_table("adapter_versions") as table:
        table.drop_column("durable")
