"""The evidence of a guarded release over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("release_runs", sa.Column("course", sa.LargeBinary()))


def downgrade() -> None:
    with op.batch_alter_table("release_runs") as table:
        table.drop_column("course")
