"""Series of versions that a training pushes, and which check each of their versions needed; null: of no series."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "adapter_series",
        sa.Column(
            "tenant_id", sa.String(63), sa.ForeignKey("tenants.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("config", sa.Text()),
        sa.Column("keep_last", sa.Integer(), nullable=False),
        sa.Column("check_every", sa.Integer(), nullable=False),
        sa.Column("latest", sa.Boolean(), nullable=False),
        sa.Column("quota", sa.Integer()),
        sa.Column("since", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "name"),
    )
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    op.add_column("adapter_versions", sa.Column("checked", sa.String(16)))


def downgrade() -> None:
    _forget_scope()
    # The server before does not know the state: what a series did not keep is deleted there.
    op.execute("UPDATE adapter_versions SET state = 'deleted' WHERE state = 'retired'")
    with op.batch_alter_table("adapter_versions") as table:
        table.drop_column("checked")
    op.drop_table("adapter_series")


def _forget_scope() -> None:
    """The server before does not know the scope adapters:train: a key that has it alone reads adapters there."""
    keys = sa.table("api_keys", sa.column("id", sa.String), sa.column("scopes", sa.JSON))
    connection = op.get_bind()
    for key, scopes in connection.execute(sa.select(keys.c.id, keys.c.scopes)).all():
        if "adapters:train" in scopes:
            left = [scope for scope in scopes if scope != "adapters:train"] or ["adapters:read"]
            connection.execute(sa.update(keys).where(keys.c.id == key).values(scopes=left))
