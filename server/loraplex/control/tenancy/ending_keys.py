"""Keys in use whose end is near, by tenant."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import case, extract, func, select
from sqlalchemy.orm import Session

from loraplex.control.db.tables import ApiKey, Tenant

AHEAD = timedelta(days=7)
"""Time before an end from which on it is near. A key that was to live no longer than that is replaced as planned."""
BEHIND = timedelta(days=1)
"""Time after the end for which it is still told."""
IN_USE = timedelta(days=7)
"""A key is in use when it was used within this time."""
NAMED = 3
"""Keys of one tenant that are named."""


@dataclass(frozen=True, slots=True)
class EndingKey:
    id: str
    name: str | None
    expires_at: datetime
    last_used_at: datetime


@dataclass(frozen=True, slots=True)
class EndingKeys:
    """A tenant's keys that end: the first `NAMED` of `count`, the one that ends first at first. Those that have ended
    come last."""

    tenant_id: str
    count: int
    keys: Sequence[EndingKey]


def ending_keys(session: Session, now: datetime, limit: int) -> tuple[Sequence[EndingKeys], int]:
    """The tenants with such keys whose first end comes first, at most `limit`, and how many there are; last those
    whose keys all ended. The keys of a suspended tenant are not in use. One statement."""
    key = ApiKey
    tenant = key.tenant_id
    ended = case((key.expires_at < now, 1), else_=0)
    whole_life = extract("epoch", key.expires_at) - extract("epoch", key.created_at)
    placed = (
        select(
            tenant, key.id, key.name, key.expires_at, key.last_used_at,
            func.row_number().over(partition_by=tenant, order_by=(ended, key.expires_at, key.id)).label("turn"),
            func.count().over(partition_by=tenant).label("of_tenant"),
            func.min(ended).over(partition_by=tenant).label("all_ended"),
            func.min(case((key.expires_at >= now, key.expires_at))).over(partition_by=tenant).label("first"),
        )
        .join(Tenant, Tenant.id == tenant)
        .where(
            Tenant.suspended_at.is_(None),
            whole_life > AHEAD.total_seconds(),
            key.revoked_at.is_(None),
            key.expires_at.between(now - BEHIND, now + AHEAD),
            key.last_used_at >= now - IN_USE,
        )
        .subquery()
    )  # fmt: skip
    its = placed.c
    tenants = func.sum(case((its.turn == 1, 1), else_=0)).over()
    query = (
        select(placed, tenants.label("tenants"))
        .where(its.turn <= NAMED)
        .order_by(its.all_ended, its.first, its.tenant_id, its.turn)
        .limit(limit * NAMED)
    )
    rows = session.execute(query).all()
    found = []
    for tenant_id, own in itertools.groupby(rows, key=lambda row: str(row.tenant_id)):
        listed = list(own)
        keys = [EndingKey(row.id, row.name, row.expires_at, row.last_used_at) for row in listed]
        found.append(EndingKeys(tenant_id, listed[0].of_tenant, keys))
    return found[:limit], int(rows[0].tenants) if rows else 0
