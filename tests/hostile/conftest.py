"""Both ports of one server, shared by the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.http.quiet import errors_alone
from support.http.whole_server import WholeServer, whole_server


@pytest.fixture(scope="session", autouse=True)
def quiet() -> Iterator[None]:
    """Errors only, on one line; the tests of the log look at it by their own way."""
    with errors_alone():
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """Tenants `acme`, with the adapter `support`, and `rival`, with another of the same name."""
    directory = tmp_path_factory.mktemp("server")
    with whole_server(directory, metrics_on_data_port=True, max_adapter_upload=8 << 20) as running:
        for number, tenant in enumerate(("acme", "rival")):
            running.plane.make_tenant(tenant)
            running.plane.make_adapter("support", tenant, seed=number)
        yield running
        running.settle()
