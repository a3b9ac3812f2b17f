"""A control plane with two ready versions of one adapter, over SQLite unless a test asks for PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control.plane import ControlPlane, use_database
from support.servers.postgres import need_programs, postgres_server


@pytest.fixture
def backend() -> str:
    return "sqlite"


@pytest.fixture
def plane(backend: str, tmp_path: Path) -> Iterator[ControlPlane]:
    """`acme` has `pirate` with v1, which is released, and v2."""
    if backend == "postgresql":
        need_programs()
        use_database(tmp_path, postgres_server().clear())
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme", weight=1.0)
    for seed in (1, 2):
        plane.add("acme", "pirate", seed)
    yield plane
    plane.close()
