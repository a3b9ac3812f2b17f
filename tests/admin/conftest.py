"""A fresh admin plane a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from support.admin import AdminPlane, admin_client
from support.control import use_database
from support.postgres import need_programs, postgres_server

ON_BOTH_DATABASES = ("test_adapter_routes", "test_release_routes", "test_tenant_routes")
"""The modules whose tests are about what the database holds; the others' are about HTTP."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        on_both = metafunc.module.__name__.endswith(ON_BOTH_DATABASES)
        metafunc.parametrize("backend", ["sqlite", "postgresql"] if on_both else ["sqlite"])


@pytest.fixture
def plane(backend: str, tmp_path: Path) -> Iterator[AdminPlane]:
    if backend == "postgresql":
        need_programs()
        use_database(tmp_path, postgres_server().clear())
    made = AdminPlane(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def admin(plane: AdminPlane) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin token."""
    async with admin_client(plane.app) as client:
        yield client
