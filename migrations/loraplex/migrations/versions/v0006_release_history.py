"""How each release came about, and who made it; what is older is filled in from the audit log, as far as that tells."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_COLUMNS = (
    sa.Column("origin", sa.String(8)),
    sa.Column("restores", sa.Integer()),
    sa.Column("actor", sa.String(8)),
    sa.Column("actor_key_id", sa.String(32)),
)
_RELEASES = sa.table(
    "releases",
    sa.column("tenant_id", sa.String),
    sa.column("name", sa.String),
    sa.column("revision", sa.Integer),
    sa.column("targets", sa.JSON),
    sa.column("sticky", sa.String),
    sa.column("origin", sa.String),
    sa.column("restores", sa.Integer),
    sa.column("actor", sa.String),
    sa.column("actor_key_id", sa.String),
)
_AUDIT = sa.table(
    "audit_log",
    *(
        sa.column(name, sa.String)
        for name in ("action", "outcome", "tenant_id", "target", "after", "actor", "actor_key_id")
    ),
)
_ORIGINS = {"release.set": "set", "release.promote": "promote", "release.rollback": "rollback"}


def upgrade() -> None:
    # Not as a batch: SQLite adds a column by itself, and a batch would copy the table.
    for column in _COLUMNS:
        op.add_column("releases", column.copy())
    connection = op.get_bind()
    acts = _audited(connection)
    query = sa.select(_RELEASES).order_by(_RELEASES.c.tenant_id, _RELEASES.c.name, _RELEASES.c.revision)
    earlier: list[dict[str, Any]] = []
    for row in connection.execute(query).mappings().all():
        if earlier and (earlier[0]["tenant_id"], earlier[0]["name"]) != (row["tenant_id"], row["name"]):
            earlier = []
        release = dict(row)
        release |= acts.get((row["tenant_id"], row["name"], row["revision"]), {})
        if release["origin"] is None:
            is_first = row["revision"] == 1 or bool(earlier and not earlier[-1]["targets"])
            release["origin"] = "delete" if not row["targets"] else "upload" if is_first else None
        if release["origin"] == "rollback":
            release["restores"] = _restored(release, earlier)
        earlier.append(release)
        connection.execute(
            sa.update(_RELEASES)
            .where(
                _RELEASES.c.tenant_id == row["tenant_id"],
                _RELEASES.c.name == row["name"],
                _RELEASES.c.revision == row["revision"],
            )
            .values({column.name: release[column.name] for column in _COLUMNS})
        )


def _audited(connection: sa.Connection) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Tenant, name and revision → what the audit log says of the revision's origin."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    query = sa.select(_AUDIT).where(_AUDIT.c.action.in_(_ORIGINS), _AUDIT.c.outcome == "done")
    for row in connection.execute(query).mappings():
        name = row["target"].split("/")[3]  # tenants/TENANT/adapters/NAME/release
        made = json.loads(row["after"])["revision"]
        found[row["tenant_id"], name, made] = {
            "origin": _ORIGINS[row["action"]],
            "actor": row["actor"],
            "actor_key_id": row["actor_key_id"],
        }
    return found


def _restored(release: dict[str, Any], earlier: list[dict[str, Any]]) -> int | None:
    """A rollback went to the newest earlier release that differed and could be served: the newest with its targets."""
    for other in reversed(earlier):
        if (other["targets"], other["sticky"]) == (release["targets"], release["sticky"]):
            return other["restores"] or int(other["revision"])
    return None


def downgrade() -> None:
    with op.batch_alter_table("releases") as table:
        for column in reversed(_COLUMNS):
            table.drop_column(column.name)
