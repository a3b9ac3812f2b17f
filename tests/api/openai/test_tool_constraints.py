"""Chats whose calls a grammar keeps in form: what the engine is asked, and how the answer is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.output.formats import REASONING_FORMATS, TOOL_FORMATS, OutputFormats
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane, running_data_plane
from support.models.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
STRICT: dict[str, Any] = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "required": ["x"]}},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    formats = OutputFormats(TOOL_FORMATS["hermes"])
    with running_data_plane(tmp_path_factory.mktemp("model"), formats=formats) as plane:
        yield plane


@pytest.fixture
def tooled(running: DataPlane) -> Iterator[DataPlane]:
    running.reset()
    yield running
    running.settle_all()


def ask(plane: DataPlane, text: str = CALL, **fields: Any) -> Any:
    plane.engine.default = Reply(text=text)
    body = {"model": BASE, "messages": [{"role": "user", "content": "?"}], "tools": [WEATHER, TIME], **fields}
    return plane.http.post(
        f"{plane.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer lpx_acme"}
    )


def lark_of(plane: DataPlane) -> str:
    """Of the one grammar that was checked and that the engine got."""
    ((tenant, checked),) = plane.grammars.checked
    assert tenant == "acme"
    assert {request.grammar for request in plane.engine.requests} == {checked}
    (grammar,) = json.loads(checked)["grammars"]
    return str(grammar["lark_grammar"])


FREE: list[dict[str, Any]] = [
    {},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [STRICT], "tool_choice": "none", "parallel_tool_calls": False},
    {"tools": None, "parallel_tool_calls": False},
    {
        "tools": [STRICT, TIME],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "get_time"}}],
            },
        },
    },
]


@pytest.mark.parametrize("fields", FREE)
def test_free_answers_have_no_grammar(tooled: DataPlane, fields: dict[str, Any]) -> None:
    assert ask(tooled, **fields).status_code == 200
    assert tooled.grammars.checked == []
    assert tooled.engine.requests[-1].grammar is None


def test_required(tooled: DataPlane) -> None:
    choice = ask(tooled, tool_choice="required", n=2).json()["choices"][1]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    lark = lark_of(tooled)
    assert "get_weather" in lark
    assert "get_time" in lark
    assert '"required":["city"]' in lark


def test_named_ends_with_stop(tooled: DataPlane) -> None:
    choice = ask(tooled, tool_choice=NAMED).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("stop", 1)
    assert "get_time" not in lark_of(tooled)


def test_strict_and_one_call_at_most_leave_text_free(tooled: DataPlane) -> None:
    choice = ask(tooled, f"Hm. {CALL}", tools=[STRICT, TIME]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hm.", "tool_calls")
    strict = lark_of(tooled)
    tooled.settle_all()
    tooled.reset()
    assert ask(tooled, "Hm.", parallel_tool_calls=False).json()["choices"][0]["message"]["content"] == "Hm."
    single = lark_of(tooled)
    # What is not strict is any object.
    assert ('"required":["city"]' in strict, '"required":["city"]' in single) == (True, False)


def test_arguments_are_streamed_as_they_come(tooled: DataPlane) -> None:
    for choice, pieces in (("required", len(ARGUMENTS)), ("auto", 1)):
        answer = ask(tooled, tool_choice=choice, stream=True)
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        calls = [
            call
            for chunk in chunks
            for part in chunk["choices"]
            for call in part["delta"].get("tool_calls", ())
        ]
        assert len(calls) == 1 + pieces
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS


def test_a_cut_under_a_grammar_leaves_the_arguments_so_far(tooled: DataPlane) -> None:
    length = CALL.index("Paris") + 2
    choice = ask(tooled, tool_choice="required", max_tokens=length).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "Pa', "length")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_cut_before_the_name_of_a_required_call_leaves_no_text(tooled: DataPlane, choice: Any) -> None:
    """It would be half a marker. OpenAI and vLLM answer with neither text nor calls there."""
    length = CALL.index("_weather")
    answer = ask(tooled, tool_choice=choice, max_tokens=length).json()["choices"][0]
    assert not answer["message"]["content"]
    assert "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "length"
    free = ask(tooled, parallel_tool_calls=False, max_tokens=length).json()["choices"][0]
    assert free["message"]["content"] == CALL[:length]


def test_an_answer_is_a_call_or_has_the_form(tooled: DataPlane) -> None:
    message = ask(tooled, '{"x": 1}', response_format=FORMAT).json()["choices"][0]["message"]
    assert message["content"] == '{"x": 1}'
    lark = lark_of(tooled)
    assert '"required":["x"]' in lark
    tooled.settle_all()
    tooled.reset()
    assert ask(tooled, response_format=FORMAT, tool_choice="required").status_code == 200
    assert '"required":["x"]' not in lark_of(tooled)


def test_other_forms_beside_tools_are_refused_by_name(tooled: DataPlane) -> None:
    for choice in ("auto", "required", NAMED):
        error = ask(tooled, structured_outputs={"regex": "a"}, tool_choice=choice).json()["error"]
        assert (error["param"], error["code"]) == ("structured_outputs", "unsupported_field")
    assert ask(tooled, structured_outputs={"regex": "a"}, tool_choice="none").status_code == 200


def test_reasoning_that_the_prompt_opened_comes_before_the_form(tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    text = TextProcessor(write_byte_tokenizer(tmp_path, chat_template=template), max_model_len=MAX_MODEL_LEN)
    formats = OutputFormats(TOOL_FORMATS["hermes"], REASONING_FORMATS["think_tags"])
    with running_data_plane(tmp_path / "other", text=text, formats=formats) as plane:
        answer = ask(plane, 'Hm.</think>{"x": 1}', tools=None, response_format=FORMAT)
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"x": 1}')
        assert "</think>" in lark_of(plane)
        answer = ask(plane, f"Hm.</think>\n{CALL}", tool_choice="required")
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], len(message["tool_calls"])) == ("Hm.", 1)
        error = ask(plane, tools=None, structured_outputs={"regex": "a"}).json()["error"]
        assert (error["param"], error["code"]) == ("structured_outputs", "unsupported_field")


@pytest.mark.parametrize(
    ("parameters", "reason", "param"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "string", "format": "x"}}},
            "Unknown format: x",
            "tools[1].function.parameters.properties.a.format",
        ),
        ({"type": "object"}, "it takes more than 0.5 s of processing time", "tools"),
        ({"type": "array"}, None, "tools[1].function.parameters"),
        ({"type": "object", "x-guidance": {}}, None, "tools[1].function.parameters.x-guidance"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_named(
    tooled: DataPlane, parameters: dict[str, Any], reason: str | None, param: str
) -> None:
    if reason is not None:
        tooled.grammars.refuse_with = [GrammarRefused(reason)]
    tool = {"type": "function", "function": {"name": "g", "parameters": parameters}}
    answer = ask(tooled, tools=[WEATHER, tool], tool_choice="required")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert tooled.engine.requests == []
    # It is looked at only where it must be followed.
    assert ask(tooled, tools=[WEATHER, tool]).status_code == 200


@pytest.mark.parametrize(
    ("schema", "param", "said"),
    [
        ({"type": "string", "format": "x"}, ".properties.a.format", "the format 'x' is not supported"),
        ({"uniqueItems": True}, ".properties.a.uniqueItems", "the keyword 'uniqueItems' is not supported"),
        ({"not": {}}, ".properties.a", "no value fits it"),
        (
            {"type": "strnig"},
            ".properties.a.type",
            "string, number, integer, boolean, object, array and null are",
        ),
        ({"pattern": "("}, "", "unclosed group"),
        ({"multipleOf": 0}, ".properties.a.multipleOf", "it must be a number above 0"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_of_the_library_names_tool_and_place_and_shows_no_grammar(
    tooled: DataPlane, schema: dict[str, Any], param: str, said: str, strict: bool
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [
        WEATHER,
        {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": strict}},
        {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}, "strict": True}},
    ]
    asked: dict[str, Any] = {"tools": tools, "tool_choice": "auto" if strict else "required"}
    ask(tooled, **asked)
    reason = LLMatcher.validate_grammar(tooled.engine.requests[-1].grammar)
    assert "json_allowed_escapes" in reason  # it shows the grammar
    tooled.grammars.refuse_with = [GrammarRefused(reason)]
    error = ask(tooled, **asked).json()["error"]
    assert error["param"] == f"tools[1].function.parameters{param}"
    assert error["message"].endswith(f"{said}.")
    assert "json_" not in error["message"]


def test_the_tool_is_named_by_its_place_in_the_request(tooled: DataPlane) -> None:
    """Not among those that may be called, and not one whose schema nobody follows."""
    bad = {"type": "object", "properties": {"a": {"type": "string", "format": "x"}}}
    loose, strict = (
        {"type": "function", "function": {"name": name, "parameters": bad, "strict": name == "strict"}}
        for name in ("loose", "strict")
    )
    named = {"type": "function", "function": {"name": "strict"}}
    for choice in (named, "auto"):
        tooled.grammars.refuse_with = [GrammarRefused("Unknown format: x")]
        error = ask(tooled, tools=[WEATHER, loose, strict], tool_choice=choice).json()["error"]
        assert error["param"] == "tools[2].function.parameters.properties.a.format"
        assert "'tools[2].function" in error["message"]


MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


def test_a_name_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    """Where calls have the name without quotes, and only if it may be called."""
    model = write_byte_tokenizer(tmp_path, special=MISTRAL)
    text = TextProcessor(model, max_model_len=MAX_MODEL_LEN)
    with running_data_plane(
        tmp_path / "other", text=text, formats=OutputFormats(TOOL_FORMATS["mistral"])
    ) as plane:
        for name in ("a[b", "[x", " a", "\na"):
            tool = {"type": "function", "function": {"name": name}}
            for choice in ("auto", "required"):
                answer = ask(plane, tools=[WEATHER, tool], tool_choice=choice)
                assert answer.status_code == 400, name
                assert answer.json()["error"]["param"] == "tools[1].function.name"
            assert ask(plane, tools=[WEATHER, tool], tool_choice=NAMED).status_code == 200
        tool = {"type": "function", "function": {"name": "a b]{é"}}
        assert ask(plane, tools=[tool]).status_code == 200
