"""LangChain, LiteLLM and the Node openai client against the whole product, an adapter as their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loraplex.api.schemas import UNSUPPORTED_CHAT
from support.client_answers import refusals
from support.live_server import EXAMPLES, SERVED_NAME, Shop
from support.outside_clients import COMMANDS, converse, skip_unless_installed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def conversation(real: Shop) -> Callable[[str], dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}

    def of(client: str) -> dict[str, Any]:
        skip_unless_installed(client)
        if client not in told:
            settings = {"url": f"{real.server.data_url}/v1", "key": real.key, "base": SERVED_NAME}
            told[client] = converse(client, fake=False, model="pirate", **settings)
        return told[client]

    return of


@pytest.mark.parametrize("client", COMMANDS)
def test_an_adapter_answers_every_way_alike(
    conversation: Callable[[str], dict[str, Any]], client: str
) -> None:
    """Whole or streamed, alone or beside others: the same words at temperature 0, and the same counts."""
    told = conversation(client)
    chat, stream = told["chat"], told["stream"]
    assert chat["text"].startswith("Arr"), told
    assert chat["finish"] == "length"
    assert chat["completion"] == 16
    assert stream.pop("pieces") > 4
    assert stream == chat
    assert told["base"] != chat["text"]
    assert not told["base"].startswith("Arr")
    assert told["turns"]["first"]
    assert told["turns"]["second"]
    assert told["developer"]
    assert told["completion"] == told["completion_stream"] != ""
    first, second = told["n"]
    assert first != second
    if client == "node":
        assert told["models"] == sorted([SERVED_NAME, *EXAMPLES])
        assert told["headers"] == {"id": "mine-1", "adapter": "pirate@v1"}
        assert told["stream_helper"] == chat
        return
    assert told["fallbacks"] == chat["text"]
    together = told["async"]
    together["streamed"].pop("pieces", None)
    assert together["whole"] == together["streamed"] == chat
    if client == "langchain":
        assert {*told["batch"], *together["batch"]} == {chat["text"]}
    else:
        assert told["models"] == sorted([SERVED_NAME, *EXAMPLES])
        assert told["hosted_vllm"] == chat
        assert told["router"] == chat["text"]


@pytest.mark.skipif("logprobs" in UNSUPPORTED_CHAT, reason="the server has no log probabilities")
@pytest.mark.parametrize("client", COMMANDS)
def test_log_probabilities_are_of_the_answers_own_tokens(
    conversation: Callable[[str], dict[str, Any]], client: str
) -> None:
    told = conversation(client)
    assert told["logprobs"] == {"text": told["chat"]["text"], "alternatives": [2], "negative": True}


@pytest.mark.parametrize("client", COMMANDS)
def test_refusals_are_the_clients_own_errors(
    conversation: Callable[[str], dict[str, Any]], client: str
) -> None:
    told = conversation(client)
    expected = refusals(client)
    assert {name: told[name] for name in expected} == expected


def test_no_client_broke_anything(real: Shop) -> None:
    assert real.server.engine()["restarts"] == 0
    real.server.wait(real.server.idle)
