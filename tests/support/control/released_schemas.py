"""A database as a release left it: its schema, and rows of every kind that a server writes.

    PYTHONPATH=tests python -m support.control.released_schemas VERSION   # once, when VERSION is released

Writes tests/control/db/schemas/VERSION.json: the migration it ends with, the columns of each table, the rows, and a
key's secret. The audit log is left out: the database takes nothing into it that is not appended.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine, insert, select, text

from loraplex.control.release_types import ReleaseTarget
from support.control.plane import ControlPlane

SCHEMAS = Path(__file__).parents[2] / "control/db/schemas"


def columns(engine: Engine) -> dict[str, list[str]]:
    found = MetaData()
    found.reflect(engine)
    return {name: sorted(column.name for column in table.columns) for name, table in found.tables.items()}


def rows_of(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    found = MetaData()
    found.reflect(engine)
    with engine.connect() as connection:
        return {
            table.name: [
                {name: _packed(value) for name, value in row._mapping.items()}
                for row in connection.execute(select(table))
            ]
            for table in found.sorted_tables
            if table.name != "alembic_version" and not table.name.startswith("audit")
        }


def write_rows(engine: Engine, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Into a database of the same schema; rows that its migrations made are replaced."""
    found = MetaData()
    found.reflect(engine)
    with engine.begin() as connection:
        for table in reversed(found.sorted_tables):
            if rows.get(table.name):
                connection.execute(table.delete())
        for table in found.sorted_tables:
            if rows.get(table.name):
                made = [{name: _unpacked(value) for name, value in row.items()} for row in rows[table.name]]
                connection.execute(insert(table), made)


def _packed(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, date):
        return {"date": value.isoformat()}
    return value


def _unpacked(value: Any) -> Any:
    match value:
        case {"bytes": str(packed)}:
            return base64.b64decode(packed)
        case {"datetime": str(packed)}:
            return datetime.fromisoformat(packed)
        case {"date": str(packed)}:
            return date.fromisoformat(packed)
    return value


def record(version: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder))
        plane.tenants.create("acme", weight=2.0, limits={"requests_per_minute": 60})
        plane.tenants.create("other")
        _, secret = plane.keys.create("acme", name="first", scopes=["inference"])
        plane.add("acme", "support", seed=1)
        plane.add("acme", "support", seed=2)
        plane.add("other", "support", seed=1)
        plane.releases.put(
            "acme", "support", [ReleaseTarget("v1", 90), ReleaseTarget("v2", 10)], sticky="user"
        )
        plane.close()
        engine = create_engine(plane.url)
        with engine.connect() as connection:
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        found = {"revision": revision, "secret": secret, "columns": columns(engine), "rows": rows_of(engine)}
        engine.dispose()
    SCHEMAS.mkdir(exist_ok=True)
    (SCHEMAS / f"{version}.json").write_text(_by_table(found))


def _by_table(found: dict[str, Any]) -> str:
    """JSON with a line for each table."""
    parts = []
    for name, value in sorted(found.items()):
        if isinstance(value, dict):
            lines = [f"  {json.dumps(table)}: {json.dumps(value[table])}" for table in sorted(value)]
            parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    record(sys.argv[1])
