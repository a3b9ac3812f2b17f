"""A database of any release, with rows in it, is brought to this version's schema and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from loraplex.migrations.run import upgrade
from support.control.plane import ControlPlane, use_database
from support.control.released_schemas import SCHEMAS, columns, write_rows
from support.servers.postgres import postgres_server

RELEASES = sorted(path.stem for path in SCHEMAS.glob("*.json"))


def test_every_release_has_its_schema() -> None:
    """From 0.1.0 on: `support.control.released_schemas` records one."""
    assert "0.1.0" in RELEASES


@pytest.mark.parametrize("version", RELEASES)
async def test_a_database_of_a_release_is_upgraded_with_its_rows(
    version: str, backend: str, tmp_path: Path
) -> None:
    released = json.loads((SCHEMAS / f"{version}.json").read_text())
    url = f"sqlite:///{tmp_path / 'control.db'}"
    if backend == "postgresql":
        url = postgres_server().create_database()
    upgrade(url, released["revision"])
    engine = create_engine(url)
    # A migration that was released never changes.
    assert columns(engine) == released["columns"]
    write_rows(engine, released["rows"])
    engine.dispose()
    upgrade(url)
    use_database(tmp_path, url)
    plane = ControlPlane(tmp_path)
    principal = await plane.key_cache().authenticate(released["secret"])
    assert principal is not None
    assert principal.tenant_id == "acme"
    assert plane.tenants.get("acme").weight == 2.0
    assert [info.version for info in plane.catalog.list_versions("acme", "support").items] == ["v1", "v2"]
    release = plane.releases.get("acme", "support")
    assert {target.version: target.weight for target in release.targets} == {"v1": 90, "v2": 10}
    plane.add("acme", "another", seed=3)  # and is written to
    plane.close()
