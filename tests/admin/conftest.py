"""A fresh admin plane a test, over SQLite: the routes add no SQL to that of tests/control."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from loraplex.admin.framework import boundary
from support.http.admin_plane import AdminPlane, admin_client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a refused body is awaited for longer than a busy machine holds up a client that sends it."""
    monkeypatch.setattr(boundary, "LEFTOVER_S", 60.0)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def admin(plane: AdminPlane) -> AsyncIterator[httpx.AsyncClient]:
    """With the admin token."""
    async with admin_client(plane.app) as client:
        yield client
