"""When a key was last used; and values of the installation as a whole, such as the pepper's mark."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True)))
    op.create_table(
        "installation",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("value", sa.String(200), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("installation")
    with op.batch_alter_table("api_keys") as table:
        table.drop_column("last_used_at")
