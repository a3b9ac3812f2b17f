from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.http.data_plane import DataPlane, running_data_plane
from support.http.quiet import errors_alone


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Errors only, on one line; the test of the access log looks at it by its own way."""
    with errors_alone():
        yield


@pytest.fixture(scope="session")
def shared_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    with running_data_plane(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture
def plane(shared_plane: DataPlane) -> Iterator[DataPlane]:
    """A data plane with nothing on it; afterwards nothing may be left running or unsettled."""
    shared_plane.reset()
    yield shared_plane
    shared_plane.settle_all()
