"""Versions of all tenants: in one list for the operator's view of the cache, and by digest for a start."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import select, tuple_

from loraplex.control import rules
from loraplex.control.catalog.versions import version_info
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page, VersionInfo

MAX_DIGESTS = 500
"""In one query."""


def list_all_versions(
    database: Database,
    limit: int,
    cursor: str | None,
    *,
    tenant_id: str | None = None,
    adapter: str | None = None,
) -> Page[VersionInfo]:
    """Living versions by tenant, name and number; of one tenant, or of adapters of one name, where these are given.
    Raises InvalidCursor."""
    key = (AdapterVersion.tenant_id, AdapterVersion.name, AdapterVersion.number)
    query = select(AdapterVersion).where(LIVING).order_by(*key).limit(limit + 1)
    if tenant_id is not None:
        query = query.where(AdapterVersion.tenant_id == tenant_id)
    if adapter is not None:
        query = query.where(AdapterVersion.name == adapter)
    after = rules.read_cursor(cursor)
    if after is not None:
        tenant, name, number = _read_key(after)
        query = query.where(tuple_(*key) > tuple_(tenant, name, number))
    with database.read() as session:
        rows = session.scalars(query).all()
        return rules.make_page(rows, limit, lambda r: f"{r.tenant_id}/{r.name}/{r.number}", version_info)


def find_ready(database: Database, tenants: Mapping[str, str]) -> dict[str, VersionInfo]:
    """Ready versions by digest, for those of these digests that have one: if there is one, of the tenant that `tenants`
    names for the digest."""
    found: dict[str, VersionInfo] = {}
    wanted = sorted(tenants)
    with database.read() as session:
        for start in range(0, len(wanted), MAX_DIGESTS):
            digests = wanted[start : start + MAX_DIGESTS]
            query = select(AdapterVersion).where(
                AdapterVersion.digest.in_(digests), AdapterVersion.state == "ready"
            )
            for row in session.scalars(query):
                if row.digest not in found or row.tenant_id == tenants[row.digest]:
                    found[row.digest] = version_info(row)
    return found


def find_living(database: Database, digests: Collection[str]) -> set[str]:
    """Those of these digests whose bytes a version has, in whatever state it is."""
    found: set[str] = set()
    wanted = sorted(digests)
    with database.read() as session:
        for start in range(0, len(wanted), MAX_DIGESTS):
            chosen = AdapterVersion.digest.in_(wanted[start : start + MAX_DIGESTS])
            found.update(session.scalars(select(AdapterVersion.digest).where(chosen, LIVING).distinct()))
    return found


def _read_key(after: str) -> tuple[str, str, int]:
    parts = after.split("/")
    if len(parts) != 3 or not parts[2].isascii() or not parts[2].isdigit() or len(parts[2]) > 9:
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    return parts[0], parts[1], int(parts[2])
