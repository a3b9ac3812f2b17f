from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data_plane import DataPlane, running_data_plane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path / "model") as running:
        yield running
        running.settle_all()
