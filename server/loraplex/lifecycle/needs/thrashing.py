"""Adapters that are loaded again and again, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import String, case, cast, exists, func, literal, select
from sqlalchemy.orm import Session, aliased
from sqlalchemy.sql.elements import ColumnElement

from loraplex.control.db.tables import LIVING, AdapterVersion, Release
from loraplex.control.turns import Turns, in_turns


@dataclass(frozen=True, slots=True)
class Thrashing:
    """A version, and how often its files came within the last hour: from the disk, and to the device."""

    tenant_id: str
    name: str
    version: str
    pinned: bool
    """This one, or another with the same files."""
    others: int
    """Versions of the tenant with the same files, which came with it."""
    elsewhere: int
    """Those of other tenants."""
    loads: int
    copies: int


def thrashing_adapters(
    session: Session, reloads: Mapping[str, Mapping[str, int]], limit: int
) -> Turns[Thrashing]:
    """The versions behind `reloads`, which has loads by stage and digest; those that came most often first, the tenants
    in turn, at most `limit`. A version that a release in force names stands for those with the same files. One
    statement at most."""
    loads, copies = reloads.get("disk", {}), reloads.get("copy", {})
    digests = sorted({*loads, *copies})
    if not digests:
        return Turns((), 0, ())
    version = AdapterVersion
    same = version.digest
    order = (_is_released().desc(), version.tenant_id, version.name, version.number)
    query = select(
        version.tenant_id, version.name, version.number, version.digest,
        func.row_number().over(partition_by=same, order_by=order).label("place"),
        func.max(case((version.pinned, 1), else_=0)).over(partition_by=same).label("pinned"),
        func.count().over(partition_by=same).label("alike"),
        func.count().over(partition_by=(same, version.tenant_id)).label("own"),
    ).where(LIVING, version.digest.in_(digests))  # fmt: skip
    listed = query.subquery()
    found: Sequence[Thrashing] = [
        Thrashing(
            tenant_id=row.tenant_id,
            name=row.name,
            version=f"v{row.number}",
            pinned=bool(row.pinned),
            others=row.own - 1,
            elsewhere=row.alike - row.own,
            loads=loads.get(row.digest, 0),
            copies=copies.get(row.digest, 0),
        )
        for row in session.execute(select(listed).where(listed.c.place == 1))
    ]
    ordered = sorted(found, key=lambda row: (-max(row.loads, row.copies), row.tenant_id, row.name))
    return in_turns(ordered, lambda row: row.tenant_id, limit)


def _is_released() -> ColumnElement[int]:
    """1 for a version that the release in force of its name has as a target, else 0."""
    version, release, newer = AdapterVersion, aliased(Release), aliased(Release)
    newest = select(func.max(newer.revision)).where(
        newer.tenant_id == version.tenant_id, newer.name == version.name
    )
    quoted = literal('%"v') + cast(version.number, String) + '"%'
    named = exists().where(
        release.tenant_id == version.tenant_id,
        release.name == version.name,
        release.revision == newest.correlate(version).scalar_subquery(),
        cast(release.targets, String).like(quoted),
    )
    return case((named, 1), else_=0)
