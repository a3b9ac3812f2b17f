"""Releases of an installation that was made before their history was kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from loraplex.control.audit.recorder import Actor, record
from loraplex.control.catalog.releases import Releases
from loraplex.control.db.database import Database
from loraplex.migrations.run import downgrade, upgrade
from support.servers.postgres import postgres_server

TIME = "2026-01-01 00:00:00+00:00"


@pytest.fixture
def url(backend: str, tmp_path: Path) -> str:
    if backend == "postgresql":
        return postgres_server().create_database()
    return f"sqlite:///{tmp_path / 'old.db'}"


def fill(url: str, name: str, releases: list[tuple[str, str | None]]) -> None:
    """Releases as schema 0005 has them: targets as JSON, and the action of the audit row that there is."""
    database = Database(url)
    with database.write() as session:

        def execute(statement: str, **values: Any) -> None:
            session.connection().execute(text(statement), values)

        execute(
            "INSERT INTO adapters (tenant_id, name, last_number, created_at) VALUES ('acme', :name, 3, :time)",
            name=name,
            time=TIME,
        )
        for number in (1, 2, 3):
            execute(
                "INSERT INTO adapter_versions (tenant_id, name, number, digest, state, rank, targets, bytes, report,"
                " base_fingerprint, pinned, created_at)"
                " VALUES ('acme', :name, :number, 'd', 'ready', 8, '[]', 1, '{}', 'b', false, :time)",
                name=name,
                number=number,
                time=TIME,
            )
        for revision, (targets, action) in enumerate(releases, start=1):
            execute(
                "INSERT INTO releases (tenant_id, name, revision, targets, sticky, created_at)"
                " VALUES ('acme', :name, :revision, :targets, 'none', :time)",
                name=name,
                revision=revision,
                targets=targets,
                time=TIME,
            )
            if action is not None:
                record(
                    session,
                    Actor("key", "acme", f"k{revision}"),
                    action,
                    f"tenants/acme/adapters/{name}/release",
                    tenant_id="acme",
                    after={"revision": revision},
                )
    database.close()


def to(version: int) -> str:
    return f'[{{"version": "v{version}", "weight": 100}}]'


def test_old_releases_get_their_history_from_the_audit_log(url: str) -> None:
    upgrade(url, "0005")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(
            text("INSERT INTO tenants (id, weight, limits, created_at) VALUES ('acme', 1, '{}', :time)"),
            {"time": TIME},
        )
    engine.dispose()
    steps = ["release.set", "release.promote", "release.rollback", "release.rollback"]
    fill(url, "bot", [(to(1), None), *zip((to(2), to(3), to(2), to(3)), steps, strict=True)])
    fill(url, "silent", [(to(1), None), (to(2), None), ("[]", None), (to(3), None)])
    upgrade(url)
    database = Database(url)
    releases = Releases(database)
    told = [(row.origin, row.restores, row.actor_key_id) for row in releases.history("acme", "bot").items]
    assert told == [
        ("rollback", 3, "k5"),
        ("rollback", 2, "k4"),
        ("promote", None, "k3"),
        ("set", None, "k2"),
        ("upload", None, None),
    ]
    assert [row.origin for row in releases.history("acme", "silent").items] == [
        "upload",
        "delete",
        None,
        "upload",
    ]
    # It toggled between v2 and v3; from here on it goes back.
    served = [releases.rollback("acme", "bot").release.targets[0].version for _ in range(2)]
    assert served == ["v2", "v1"]
    database.close()
    downgrade(url, "0005")
    upgrade(url)
