"""LangChain, LiteLLM and the Node openai client against the whole product, an adapter as their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.clients.answers import refusals
from support.clients.outside_clients import COMMANDS, converse, skip_unless_installed
from support.servers.live_server import EXAMPLES, SERVED_NAME, Shop

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


def near(value: Any) -> Any:
    """Equal to it except rounding."""
    if isinstance(value, dict):
        return {name: near(item) for name, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("client", COMMANDS)
def test_log_probabilities_are_those_that_the_openai_client_gets(
    real: Shop, conversation: Callable[[str], dict[str, Any]], client: str
) -> None:
    """Which test_openai_logprobs.py holds against transformers and PEFT."""
    told, create = conversation(client), real.openai().chat.completions.create
    messages: Any = [{"role": "user", "content": "What do you think of the sea?"}]
    answer = create(
        model="pirate", messages=messages, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    expected = [entry.model_dump() for entry in choice.logprobs.content or []]
    expected = [{"top": entry.pop("top_logprobs"), **entry} for entry in expected]
    assert len(expected) == 16
    assert told["logprobs"] == {"whole": near(expected), "streamed": near(expected)}
    assert "".join(entry["token"] for entry in expected) == told["chat"]["text"]
    echo = real.openai().completions.create(
        model="pirate", prompt="The sea is", max_tokens=16, temperature=0, echo=True, logprobs=1
    )
    (expected_echo,) = echo.choices
    assert expected_echo.logprobs is not None
    assert expected_echo.logprobs.token_logprobs is not None
    assert expected_echo.logprobs.token_logprobs[0] is None
    assert told["echo"] == {
        "text": f"The sea is{told['completion']}",
        "logprobs": near(expected_echo.logprobs.model_dump()),
    }


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
