from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.control import ControlPlane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane with the tenants `acme` and `rival`."""
    plane = ControlPlane(tmp_path)
    plane.tenants.create("acme")
    plane.tenants.create("rival")
    yield plane
    plane.close()
