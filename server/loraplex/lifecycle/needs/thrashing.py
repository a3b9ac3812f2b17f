"""Adapters that are loaded again and again, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.turns import Turns, in_turns


@dataclass(frozen=True, slots=True)
class Thrashing:
    """A version, and how often it came within the last hour: from the disk, and to the device. `others` are versions
    with the same files, which came with it."""

    tenant_id: str
    name: str
    version: str
    pinned: bool
    others: int
    loads: int
    copies: int


def thrashing_adapters(
    session: Session, reloads: Mapping[str, Mapping[str, int]], limit: int
) -> Turns[Thrashing]:
    """The versions behind `reloads`, which has loads by stage and digest; those that came most often first, the tenants
    in turn, at most `limit`. One statement at most."""
    loads, copies = reloads.get("disk", {}), reloads.get("copy", {})
    digests = sorted({*loads, *copies})
    if not digests:
        return Turns((), 0, ())
    version = AdapterVersion
    place = func.row_number().over(
        partition_by=version.digest, order_by=(version.tenant_id, version.name, version.number)
    )
    alike = func.count().over(partition_by=version.digest)
    query = select(
        version.tenant_id, version.name, version.number, version.digest, version.pinned,
        place.label("place"), alike.label("alike"),
    ).where(LIVING, version.digest.in_(digests))  # fmt: skip
    listed = query.subquery()
    found: Sequence[Thrashing] = [
        Thrashing(
            tenant_id=row.tenant_id,
            name=row.name,
            version=f"v{row.number}",
            pinned=row.pinned,
            others=row.alike - 1,
            loads=loads.get(row.digest, 0),
            copies=copies.get(row.digest, 0),
        )
        for row in session.execute(select(listed).where(listed.c.place == 1))
    ]
    ordered = sorted(found, key=lambda row: (-max(row.loads, row.copies), row.tenant_id, row.name))
    return in_turns(ordered, lambda row: row.tenant_id, limit)
