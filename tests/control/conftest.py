from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from loraplex.control.db import postgres_engine
from loraplex.control.db.database import utc_now
from loraplex.control.db.tables import Tenant
from loraplex.control.usage import journal
from support.control.plane import ControlPlane, use_database
from support.servers.postgres import need_programs, postgres_server

ON_SQLITE_ALONE = (
    "test_arms",
    "test_healing",
    "test_keys",
    "test_long_hashes",
    "test_release_runs",
    "test_resolver",
    "test_running_arms",
    "test_shadow_store",
    "test_shown_models",
    "test_tenants",
    "test_usage_full_disk",
)
"""The modules whose tests are about rules that read and write rows as others do. What the databases do differently
(locks, isolation, constraints, time, JSON, migrations, outages) is in the others, which run on both."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        alone = metafunc.module.__name__.endswith(ON_SQLITE_ALONE)
        metafunc.parametrize("backend", ["sqlite"] if alone else ["sqlite", "postgresql"])


PATIENCE_S = 60


@pytest.fixture(autouse=True)
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk and a PostgreSQL that a busy machine holds up for seconds are not away. Tests of outages wait as servers
    do."""
    monkeypatch.setattr(journal, "SYNC_WAIT_S", PATIENCE_S)
    if not request.module.__name__.endswith("outage"):
        monkeypatch.setattr(postgres_engine, "CONNECT_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(postgres_engine, "PING_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(postgres_engine.BoundedConnection, "patience_s", PATIENCE_S)


@pytest.fixture
def plane(backend: str, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with the tenants `acme` and `rival`."""
    if backend == "postgresql":
        need_programs()
        use_database(tmp_path, postgres_server().clear())
    plane = ControlPlane(tmp_path)
    with plane.database.write() as session:
        for name in ("acme", "rival"):
            session.add(Tenant(id=name, weight=1.0, limits={}, created_at=utc_now()))
    yield plane
    plane.close()


@pytest.fixture
def statements(plane: ControlPlane) -> Iterator[list[str]]:
    """The SELECTs that the plane's engine runs from now on."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT"):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield seen
    event.remove(Engine, "before_cursor_execute", note)
