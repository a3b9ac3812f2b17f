"""Files in parts, batches, and their results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column(
            "tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("filename", sa.String(256), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("ready", sa.Boolean(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("batch_id", sa.String(40)),
        sa.Column("of_errors", sa.Boolean()),
    )
    op.create_index("ix_files_tenant_created", "files", ["tenant_id", "created_at", "id"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "file_parts",
        sa.Column("file_id", sa.String(40), sa.ForeignKey("files.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("first_line", sa.Integer(), nullable=False),
        sa.Column("repeated", sa.JSON(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )
    _create_batches()


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column(
            "tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("endpoint", sa.String(32), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("labels", sa.JSON()),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in ("total", "completed", "failed")),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("cancelling_at", _TIME),
        sa.Column("ended_at", _TIME),
        sa.Column("output_file_id", sa.String(40)),
        sa.Column("error_file_id", sa.String(40)),
        sa.Column("error", sa.String(200)),
    )
    op.create_index("ix_batches_tenant_created", "batches", ["tenant_id", "created_at", "id"])
    op.create_index("ix_batches_status", "batches", ["status"])

    def of_batch() -> sa.Column[str]:
        key = sa.ForeignKey("batches.id", ondelete="CASCADE")
        return sa.Column("batch_id", sa.String(40), key, primary_key=True)

    op.create_table(
        "batch_parts",
        of_batch(),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column("holder", sa.String(32), nullable=False),
        sa.Column("until", _TIME, nullable=False),
        sa.Column("takes", sa.Integer(), nullable=False),
    )
    op.create_table(
        "batch_results",
        of_batch(),
        sa.Column("line", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("batch_results")
    op.drop_table("batch_parts")
    op.drop_table("batches")
    op.drop_table("file_parts")
    op.drop_table("files")
