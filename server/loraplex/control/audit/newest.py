"""The newest row of the audit log about each target, for an operator who looks at many tenants at once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, or_, select
from sqlalchemy.orm import Session

from loraplex.control.audit.recorder import Outcome
from loraplex.control.db.tables import AuditRow
from loraplex.control.turns import MAX_NAMED, Turns


@dataclass(frozen=True, slots=True)
class Notice:
    """The newest act of a kind on one target, such as `tenants/acme/adapters/support/release`."""

    tenant_id: str
    target: str
    time: datetime
    code: str | None


def newest_notices(
    session: Session, action: str, outcome: Outcome, since: datetime, limit: int
) -> Turns[Notice]:
    """The targets of `action` since then, each with its newest row: the tenants in turn, at most `limit`, the newest
    first within a turn. A key that named another tenant's adapter says nothing about that tenant. One statement."""
    row = AuditRow
    # Uploads to a series are uploads to its name.
    target = func.replace(row.target, "/series/versions", "/versions")
    of_each = (
        select(row.tenant_id, func.max(row.seq).label("seq"))
        .where(
            row.action == action,
            row.outcome == outcome,
            row.time >= since,
            row.tenant_id.is_not(None),
            or_(row.actor_tenant_id.is_(None), row.actor_tenant_id == row.tenant_id),
        )
        .group_by(row.tenant_id, target)
        .subquery()
    )
    of_tenant = of_each.c.tenant_id
    turn = func.row_number().over(partition_by=of_tenant, order_by=of_each.c.seq.desc()).label("turn")
    counted = select(
        of_each.c.seq,
        turn,
        func.count().over(partition_by=of_tenant).label("of_tenant"),
        func.count().over().label("total"),
    ).subquery()
    query = (
        select(row.tenant_id, row.target, row.time, row.code, counted.c.of_tenant, counted.c.total)
        .join(counted, counted.c.seq == row.seq)
        .order_by(counted.c.turn, row.seq.desc())
        .limit(limit)
    )
    found = session.execute(query).all()
    left: dict[str, int] = {}
    for one in found:
        left[str(one.tenant_id)] = left.get(str(one.tenant_id), one.of_tenant) - 1
    more = sorted(((tenant, count) for tenant, count in left.items() if count), key=lambda one: -one[1])
    rows = [Notice(str(one.tenant_id), one.target, one.time, one.code) for one in found]
    return Turns(rows, found[0].total if found else 0, more[:MAX_NAMED])
