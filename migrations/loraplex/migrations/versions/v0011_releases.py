"""Releases with a guard, a schedule or a shadow: what they were set to, where they stand, and their evidence."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_COLUMNS = (
    sa.Column("guard", sa.JSON()),
    sa.Column("schedule", sa.JSON()),
    sa.Column("shadow", sa.JSON()),
    sa.Column("began", sa.Integer()),
    sa.Column("reason", sa.String(200)),
)
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("releases", column.copy())
    _create_runs()
    _create_shadows()
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(32), nullable=False),
        sa.Column("term", sa.BigInteger(), nullable=False),
        sa.Column("until", _TIME, nullable=False),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(63), nullable=False),
        sa.Column("event", sa.String(40), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_at", _TIME, nullable=False),
    )
    op.create_index("ix_webhook_deliveries_next_at", "webhook_deliveries", ["next_at"])


def _name_columns(*, is_key: bool) -> tuple[sa.Column[str], sa.Column[str]]:
    return (
        sa.Column("tenant_id", sa.String(63), primary_key=is_key, nullable=False),
        sa.Column("name", sa.String(63), primary_key=is_key, nullable=False),
    )


def _of_adapter() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant_id", "name"], ["adapters.tenant_id", "adapters.name"], ondelete="CASCADE"
    )


def _create_runs() -> None:
    op.create_table(
        "release_runs",
        *_name_columns(is_key=True),
        sa.Column("began", sa.Integer(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(12), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("reason", sa.String(200)),
        sa.Column("control", sa.Integer(), nullable=False),
        sa.Column("candidate", sa.Integer(), nullable=False),
        sa.Column("guard_state", sa.LargeBinary()),
        _of_adapter(),
    )
    op.create_table(
        "release_outcomes",
        sa.Column("id", sa.String(32), primary_key=True),
        *_name_columns(is_key=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("key_hash", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("first_token_s", sa.Double()),
        sa.Column("inter_token_s", sa.Double()),
        sa.Column("output_tokens", sa.Double(), nullable=False),
    )
    op.create_index("ix_release_outcomes_name", "release_outcomes", ["tenant_id", "name"])
    op.create_table(
        "running_arms",
        sa.Column("server_id", sa.String(32), primary_key=True),
        *_name_columns(is_key=True),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("oldest", sa.JSON(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )


def _create_shadows() -> None:
    sums = ("samples", "dropped", "failed", "exact", "diverged_at", "live_tokens", "shadow_tokens", "scored")
    op.create_table(
        "shadow_counts",
        *_name_columns(is_key=True),
        sa.Column("began", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("version", sa.Integer(), primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in sums),
        sa.Column("live_logprob", sa.Double(), nullable=False),
        sa.Column("shadow_logprob", sa.Double(), nullable=False),
        _of_adapter(),
    )
    op.create_table(
        "shadow_texts",
        sa.Column("id", sa.String(32), primary_key=True),
        *_name_columns(is_key=False),
        sa.Column("began", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("shadow_answer", sa.Text(), nullable=False),
        _of_adapter(),
    )
    op.create_index("ix_shadow_texts_at", "shadow_texts", ["tenant_id", "name", "at"])


def downgrade() -> None:
    # The version before keeps each release's weights as they are, and watches none.
    for created in (
        "shadow_texts",
        "shadow_counts",
        "running_arms",
        "release_outcomes",
        "release_runs",
        "webhook_deliveries",
        "leases",
    ):
        op.drop_table(created)
    with op.batch_alter_table("releases") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
