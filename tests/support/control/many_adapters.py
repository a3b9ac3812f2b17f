"""Many adapters at once, as copies of the rows of one: an upload of each would take minutes."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import insert, select

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Adapter, AdapterVersion, Release

COPIED = (Adapter, AdapterVersion, Release)


def copy_adapter(database: Database, like: tuple[str, str], names: Iterable[tuple[str, str]]) -> None:
    """Make adapters, each a tenant and a name, with the versions and releases of `like`, and its bytes."""
    wanted = list(names)
    with database.write() as session:
        for table in COPIED:
            columns = table.__table__.c
            of_one = select(*columns).where(table.tenant_id == like[0], table.name == like[1])
            rows = [dict(row) for row in session.execute(of_one).mappings()]
            copies = [row | {"tenant_id": tenant, "name": name} for tenant, name in wanted for row in rows]
            session.execute(insert(table), copies)
