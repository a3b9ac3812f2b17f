"""Calls by the real model: the example adapter that was trained to call in its own format, beside versions of other
formats that must call."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema_rs
import openai
import pytest

from support.servers.live_server import ADAPTER_FILES, EXAMPLE_ADAPTERS, LiveServer, Shop, post_version

pytestmark = pytest.mark.slow

TENANT = "caller"
TRAINED = EXAMPLE_ADAPTERS.parent / "tool-adapter"
FORMATS = {"hermes": "hermes", "llama": "llama3", "phi": "phi", "plain": "json"}
"""Versions of example adapters that were not trained for tools."""


def tool(name: str, description: str, /, **kinds: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} if isinstance(kind, str) else kind for key, kind in kinds.items()},
        "required": list(kinds),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


WEATHER = tool("get_weather", "The weather of a city.", city="string")
TIMER = tool("set_timer", "Starts a timer.", minutes="integer")
TRANSLATE = tool("translate", "Translates a word.", word="string", language="string")
ADD = tool("add", "Adds two numbers.", a="integer", b="integer")
QUESTIONS: list[tuple[str, list[dict[str, Any]], str, dict[str, Any]]] = [
    ("How is the weather in Lima?", [TIMER, WEATHER], "get_weather", {"city": "Lima"}),
    ("Set a timer for 15 minutes.", [WEATHER, TIMER, ADD], "set_timer", {"minutes": 15}),
    (
        "Translate river into German.",
        [TRANSLATE, WEATHER],
        "translate",
        {"word": "river", "language": "German"},
    ),
    ("Add 7 and 40.", [WEATHER, ADD], "add", {"a": 7, "b": 40}),
]
PLACE = tool(
    "note_place",
    "Keeps a place.",
    name={"type": "string", "maxLength": 12},
    kind={"enum": ["town", 'the "old" mill', "Ōsaka"]},
    at={"type": "array", "items": {"type": "integer", "minimum": -180, "maximum": 180}, "maxItems": 2},
)
WAIT = tool("wait", "Waits.", minutes={"type": "integer", "minimum": 0, "maximum": 600})
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in (PLACE, WAIT)}


def push(server: LiveServer, name: str, folder: Any, tool_format: str) -> None:
    files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
    serving = json.dumps({"tool_format": tool_format})
    answer = post_version(server.admin, f"tenants/{TENANT}/adapters/{name}/versions", files, serving=serving)
    assert answer.status_code in (201, 200), answer.text


@pytest.fixture(scope="module")
def caller(real: Shop) -> openai.OpenAI:
    real.server.create_tenant(TENANT)
    push(real.server, "trained", TRAINED, "mistral")
    for (name, tool_format), folder in zip(
        FORMATS.items(), ("json", "pirate", "sentiment", "json"), strict=True
    ):
        push(real.server, name, EXAMPLE_ADAPTERS / folder, tool_format)
    return real.openai(real.server.create_key(TENANT))


def ask_trained(
    client: openai.OpenAI, question: str, tools: list[dict[str, Any]], *, stream: bool = False
) -> Any:
    body: dict[str, Any] = {
        "model": "trained",
        "messages": [{"role": "user", "content": question}],
        "tools": tools[:: -1 if stream else 1],
        "temperature": 0,
        "max_tokens": 80,
    }
    if not stream:
        return client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion().choices[0]


def ask_required(client: openai.OpenAI, number: int, model: str | None = None) -> str:
    """What became of a call that must be made: "right", or what is wrong with it. The schemas bound its length."""
    answer = client.chat.completions.create(
        model=model or [*FORMATS][number % len(FORMATS)],
        messages=[{"role": "user", "content": f"Do something, number {number}."}],
        tools=[PLACE, WAIT],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=number % 10 == 0,
        temperature=1,
        seed=number,
        max_tokens=1500,
    )
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    if choice.finish_reason != "tool_calls" or choice.message.content is not None or not calls:
        return f"no calls: {choice}"
    if number % 10 and len(calls) > 1:
        return f"several calls: {calls}"
    for call in calls:
        assert call.type == "function"
        if not jsonschema_rs.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments)):
            return f"does not fit: {call}"
    return "right"


def check_trained(choice: Any, name: str, arguments: dict[str, Any]) -> None:
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_the_trained_adapter_calls_the_right_tool(caller: openai.OpenAI, stream: bool) -> None:
    for question, tools, name, arguments in QUESTIONS[: 2 if stream else 4]:
        check_trained(ask_trained(caller, question, tools, stream=stream), name, arguments)


def test_the_trained_adapter_answers_in_words_where_no_tool_is_asked_for(caller: openai.OpenAI) -> None:
    choice = ask_trained(caller, "Tell me about cats.", [TIMER, WEATHER])
    assert choice.message.tool_calls is None
    assert "cat" in choice.message.content.lower()


def test_the_base_model_which_was_not_trained_to_call_does_so_by_the_schema(caller: openai.OpenAI) -> None:
    (base,) = [model.id for model in caller.models.list() if getattr(model, "parent", None) is None]
    assert {ask_required(caller, number, base) for number in range(1, 3)} == {"right"}


@pytest.mark.parametrize("number", [4, pytest.param(1000, marks=pytest.mark.soak)])
def test_versions_of_five_formats_call_in_one_batch(caller: openai.OpenAI, number: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        required = [pool.submit(ask_required, caller, place) for place in range(number)]
        trained = [pool.submit(ask_trained, caller, question, tools) for question, tools, _, _ in QUESTIONS]
    found = Counter(each.result() for each in required)
    assert found == {"right": number}
    for future, (_, _, name, arguments) in zip(trained, QUESTIONS, strict=True):
        check_trained(future.result(), name, arguments)
