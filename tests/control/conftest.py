from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from support.control import ControlPlane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with the tenants `acme` and `rival`."""
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme")
    plane.tenants.create("rival")
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
