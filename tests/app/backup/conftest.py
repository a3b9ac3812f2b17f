"""An installation in use, on either database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.app.settings import Settings
from loraplex.control.tenancy.pepper import check_pepper
from support.control.backup import Installation, Machine, empty_machine
from support.control.plane import use_database
from support.http.admin_plane import PEPPER, AdminPlane
from support.servers.postgres import need_programs, postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "postgresql":
        monkeypatch.setenv("PATH", f"{need_programs()}{os.pathsep}{os.environ['PATH']}")
    return str(request.param)


@pytest.fixture
def used(backend: str, tmp_path: Path) -> Iterator[Installation]:
    """Two tenants with the same bytes; one has a second version of them and one that is deleted."""
    root = tmp_path / "data"
    root.mkdir()
    if backend == "postgresql":
        use_database(root, postgres_server().clear())
    plane = AdminPlane(root)
    (root / "key-pepper").write_text(PEPPER.hex() + "\n")
    (root / "admin-token").write_text("lpx-admin-for-tests\n")
    check_pepper(plane.database, PEPPER)
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
        plane.make_adapter("support", tenant, seed=1)
    plane.make_adapter(seed=2)
    plane.make_adapter(seed=3)
    plane.services.catalog.delete_version("acme", "support", "v3")
    settings = Settings(data_dir=root, database_url=plane.database.url, model="none")
    yield Installation(plane, settings, plane.make_key("acme", "adapters:read"))
    plane.close()


@pytest.fixture
def machine(backend: str, tmp_path: Path) -> Machine:
    return empty_machine(backend, tmp_path)


@pytest.fixture
def backup(used: Installation) -> Path:
    return used.backup()
