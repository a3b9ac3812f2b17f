from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from loraplex.control.database import utc_now
from loraplex.control.tables import Tenant
from support.control import ControlPlane, use_database
from support.postgres import need_programs, postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    """The database that the test runs on; every one runs on both."""
    if request.param == "postgresql":
        need_programs()
    return str(request.param)


@pytest.fixture
def plane(backend: str, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with the tenants `acme` and `rival`."""
    if backend == "postgresql":
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
