"""A fresh admin plane a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from support.admin import AdminPlane, admin_client
from support.control import use_database
from support.postgres import need_programs, postgres_server


@pytest.fixture(params=["sqlite", "postgresql"])
def plane(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AdminPlane]:
    """On both databases."""
    if request.param == "postgresql":
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
