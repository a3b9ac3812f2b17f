"""A fresh admin plane a test, over SQLite, with its engine and its checks of versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.http.admin_plane import AdminPlane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[AdminPlane]:
    made = AdminPlane(tmp_path)
    yield made
    made.close()
