"""Indexes for pushes to a series: without them each push reads every version that the series left behind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_KEY = ["tenant_id", "name", "number"]
_LIVING = sa.text("state NOT IN ('deleted', 'rejected', 'retired', 'lost')")
_CHECKED = sa.text("checked = 'numbers'")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        # The indexes need less, but a later migration of the same transaction adds a column, and a push that holds
        # the table for reading and waits to write would be waited for in turn.
        op.execute("LOCK TABLE adapter_versions IN ACCESS EXCLUSIVE MODE")
    _index("ix_adapter_versions_living", _LIVING)
    _index("ix_adapter_versions_checked", _CHECKED)


def downgrade() -> None:
    op.drop_index("ix_adapter_versions_checked", "adapter_versions")
    op.drop_index("ix_adapter_versions_living", "adapter_versions")


def _index(name: str, rows: sa.TextClause) -> None:
    op.create_index(name, "adapter_versions", _KEY, sqlite_where=rows, postgresql_where=rows)
