"""Clients that call tools and want answers of a type, against a data plane whose engine is scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.serving.output.formats import TOOL_FORMATS, OutputFormats
from support.clients.outside_clients import Stage, converse, skip_unless_installed
from support.clients.tool_answers import ANSWERS
from support.http.data_plane import BASE, running_data_plane

pytestmark = pytest.mark.slow

CHECKS = [(client, name) for client, answers in ANSWERS.items() for name in answers]
Told = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What a client told of its whole conversation."""
    known: dict[str, dict[str, Any]] = {}

    def of(client: str) -> dict[str, Any]:
        skip_unless_installed(client)
        if client not in known:
            with running_data_plane(
                tmp_path_factory.mktemp(client), formats=OutputFormats(TOOL_FORMATS["hermes"])
            ) as plane:
                settings = {"url": f"{plane.url}/v1", "key": "lpx_acme", "base": BASE, "model": "pirate"}
                known[client] = converse(client, Stage(plane), **settings)
                plane.settle_all()
        return known[client]

    return of


@pytest.mark.parametrize(("client", "name"), CHECKS)
def test_the_client_was_told(told: Told, client: str, name: str) -> None:
    assert told(client)[name] == ANSWERS[client][name]


@pytest.mark.parametrize("client", ANSWERS)
def test_every_check_is_looked_at(told: Told, client: str) -> None:
    assert set(told(client)) == set(ANSWERS[client])
