"""The time since when a tenant is suspended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("tenants", sa.Column("suspended_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    # The server before serves every tenant: what was suspended must not come back unseen.
    suspended = op.get_bind().scalar(sa.text("SELECT count(*) FROM tenants WHERE suspended_at IS NOT NULL"))
    if suspended:
        raise RuntimeError(f"{suspended} tenants are suspended; resume or delete them before the downgrade.")
    with op.batch_alter_table("tenants") as table:
        table.drop_column("suspended_at")
