"""The first schema: tenants, keys, adapters, versions, releases.

Migrations name their columns themselves and import no tables: what they did must not change when the tables do.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(63), primary_key=True),
        sa.Column("display_name", sa.String(200)),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column(
            "tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("name", sa.String(200)),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("previous_hash", sa.String(64)),
        sa.Column("previous_valid_until", _TIME),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("models", sa.JSON()),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME),
        sa.Column("revoked_at", _TIME),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "adapters",
        sa.Column(
            "tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("last_number", sa.Integer(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
    )
    op.create_table(
        "adapter_versions",
        sa.Column("tenant_id", sa.String(63), primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("base_fingerprint", sa.String(64), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
    )
    op.create_index("ix_adapter_versions_digest", "adapter_versions", ["digest"])
    op.create_table(
        "releases",
        sa.Column("tenant_id", sa.String(63), primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("revision", sa.Integer(), primary_key=True),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("sticky", sa.String(8), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    for table in ("releases", "adapter_versions", "adapters", "api_keys", "tenants"):
        op.drop_table(table)
