"""Each client holds its conversation once; the tests look at what it told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loraplex.api import drain
from support.clients.outside_clients import BackAfterOneRefusal, Stage, converse, skip_unless_installed
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, running_data_plane


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], dict[str, Any]]]:
    """What a client told of its conversation with a server whose engine always says the same."""
    told: dict[str, dict[str, Any]] = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(drain, "RETRY_ELSEWHERE_S", 1.0)  # each client would wait for the true five seconds

    def of(client: str, answer: str) -> dict[str, Any]:
        skip_unless_installed(client)
        if client not in told:
            with running_data_plane(tmp_path_factory.mktemp(client), drain=BackAfterOneRefusal()) as plane:
                plane.engine.default = Reply(text=answer)
                settings = {"url": f"{plane.url}/v1", "key": "lpx_acme", "base": BASE, "model": "pirate"}
                told[client] = converse(client, Stage(plane), **settings)
                plane.settle_all()
        return told[client]

    yield of
    patch.undo()
