"""Token budgets: what is spent in a period, and the slices that servers hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "budgets",
        sa.Column("owner_kind", sa.String(8), primary_key=True),
        sa.Column("owner_id", sa.String(63), primary_key=True),
        sa.Column("period", sa.String(8), primary_key=True),
        sa.Column("starts_at", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE")),
        sa.Column("spent", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_budgets_tenant_id", "budgets", ["tenant_id"])
    op.create_table(
        "budget_slices",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("owner_kind", sa.String(8), nullable=False),
        sa.Column("owner_id", sa.String(63), nullable=False),
        sa.Column("period", sa.String(8), nullable=False),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("drawn", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["owner_kind", "owner_id", "period", "starts_at"],
            ["budgets.owner_kind", "budgets.owner_id", "budgets.period", "budgets.starts_at"],
            ondelete="CASCADE",
        ),
    )
    op.create_index("ix_budget_slices_owner", "budget_slices", ["owner_kind", "owner_id"])


def downgrade() -> None:
    op.drop_table("budget_slices")
    op.drop_table("budgets")
