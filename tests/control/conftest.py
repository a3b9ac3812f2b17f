from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from support.control import ControlPlane


@pytest.fixture(scope="session")
def fresh_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a control plane that was made and closed: migrating is the same for every test."""
    root = tmp_path_factory.mktemp("fresh")
    plane = ControlPlane(root)
    plane.tenants.create("acme")
    plane.tenants.create("rival")
    plane.close()
    return root


@pytest.fixture
def plane(fresh_root: Path, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with the tenants `acme` and `rival`."""
    shutil.copytree(fresh_root, tmp_path, dirs_exist_ok=True)
    plane = ControlPlane(tmp_path)
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
