from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from support.data_plane import DataPlane, running_data_plane


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Errors only, on one line; the test of the access log looks at it by its own way."""
    structlog.configure(
        processors=[structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
    )
    yield
    structlog.reset_defaults()


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
