"""LangChain, LiteLLM and the Node openai client against a data plane whose engine is scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.clients.answers import scripted as expected
from support.clients.outside_clients import COMMANDS

pytestmark = pytest.mark.slow

ANSWER = "Hello wörld"
NUM_PROMPT = len(
    "<user\nWhat do you think of the sea?>\n<assistant\n"
)  # each of the template's marks is one token
CHECKS = [(client, name) for client in COMMANDS for name in expected(client, ANSWER, NUM_PROMPT)]


@pytest.mark.parametrize(("client", "name"), CHECKS)
def test_the_client_was_told(scripted: Callable[[str, str], dict[str, Any]], client: str, name: str) -> None:
    assert scripted(client, ANSWER)[name] == expected(client, ANSWER, NUM_PROMPT)[name]


@pytest.mark.parametrize("client", COMMANDS)
def test_every_check_is_looked_at(scripted: Callable[[str, str], dict[str, Any]], client: str) -> None:
    assert set(scripted(client, ANSWER)) == set(expected(client, ANSWER, NUM_PROMPT))
