"""Usage: a row a request, sums of days that are long past, and how far each server's journal has been read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("adapter", sa.String(63), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("endpoint", sa.String(32), nullable=False),
        sa.Column("streamed", sa.Boolean(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("first_token_s", sa.Double()),
        sa.Column("total_s", sa.Double(), nullable=False),
    )
    op.create_index("ix_usage_at", "usage", ["at"])
    op.create_index("ix_usage_tenant_at", "usage", ["tenant_id", "at"])
    op.create_table(
        "usage_days",
        sa.Column("at", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("tenant_id", sa.String(63), primary_key=True),
        sa.Column("key_id", sa.String(32), primary_key=True),
        sa.Column("adapter", sa.String(63), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("status", sa.String(32), primary_key=True),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_usage_days_tenant_at", "usage_days", ["tenant_id", "at"])
    op.create_table(
        "usage_sources",
        sa.Column("life", sa.String(32), primary_key=True),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("offset", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    for table in ("usage_sources", "usage_days", "usage"):
        op.drop_table(table)
