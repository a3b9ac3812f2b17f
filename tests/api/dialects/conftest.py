from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.http.data_plane import DataPlane
from support.http.tool_plane import tool_plane


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    with tool_plane(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def speaking(shared: DataPlane) -> Iterator[DataPlane]:
    """A data plane whose model thinks and calls, with nothing on it; afterwards nothing may be left running."""
    shared.reset()
    yield shared
    shared.settle_all()
