"""Tags of adapters."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_tags",
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("tag", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "name", "tag"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_tags_tag", "adapter_tags", ["tag"])


def downgrade() -> None:
    op.drop_table("adapter_tags")
