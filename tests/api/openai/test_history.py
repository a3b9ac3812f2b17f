"""Earlier turns of a chat, of any server: none is refused, and templates get them in one form."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loraplex.api.errors import ApiError
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.schemas import ChatRequest

HI = {"role": "user", "content": "hi"}


def told(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    request = parse_request(ChatRequest, {"model": "m", "messages": list(messages)})
    return [message.for_template() for message in request.messages]


def answer(**fields: Any) -> dict[str, Any]:
    """What the template gets of an earlier answer."""
    return told(HI, {"role": "assistant", **fields}, HI)[1]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"text": "half a sent', '{"text": "half a sent'),
        ('{"text": "x"} and so on', '{"text": "x"} and so on'),
        ("[]", "[]"),
        ("3", "3"),
        ("", "{}"),
        (" ", "{}"),
        ("null", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a":1}'),
        ([1], "[1]"),
        (True, "true"),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ({"function": {"name": "f"}}, '{"function":{"name":"f"}}'),
    ],
)
def test_arguments_of_an_earlier_call(given: Any, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    assert answer(content=None, tool_calls=[call])["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    ]


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "f"}},
        {"id": None, "type": "function", "function": {"name": "f", "arguments": {}}, "index": 0},
        {"id": "", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"google": {"x": "y"}}},
        {"type": "tool_call", "name": "f", "args": {}},
        {"type": "custom", "custom": {"name": "f", "input": "{}"}},
    ],
)
def test_an_earlier_call_in_other_forms(call: dict[str, Any]) -> None:
    """A result without an id belongs to the first call that has none yet."""
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": {"b": 1}}]
    messages = told(HI, {"role": "assistant", "tool_calls": [call, call]}, *results, answer_of_words(), HI)
    first, second = messages[1]["tool_calls"]
    assert first["function"] == second["function"] == {"name": "f", "arguments": "{}"}
    assert [message["tool_call_id"] for message in messages[2:4]] == [first["id"], second["id"]]
    assert first["id"] != second["id"]
    assert [message["content"] for message in messages[2:4]] == ["a", '{"b":1}']


def answer_of_words() -> dict[str, Any]:
    return {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("label", ["toolu_01", "call_1", "abcdefghi", "functions.f:0", "x" * 5000])
def test_an_id_of_another_server_is_the_same_for_call_and_result(label: str) -> None:
    """Some servers keep a signature in it, of thousands of characters."""
    call = {"id": label, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": label, "content": "r"}
    messages = told(HI, {"role": "assistant", "tool_calls": [call]}, result)
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]
    assert len(messages[2]["tool_call_id"]) <= 256
    # Two results of one call, and one whose call is not there.
    other = {**result, "tool_call_id": "lost"}
    assert [m["content"] for m in told(HI, other, *messages[1:], result, answer_of_words(), HI)][1:5] == [
        "r",
        "",
        "r",
        "r",
    ]


@pytest.mark.parametrize(
    ("fields", "content", "reasoning"),
    [
        ({"content": None}, "", None),
        ({}, "", None),
        ({"content": []}, "", None),
        ({"content": None, "refusal": "I can't."}, "I can't.", None),
        ({"content": "No.", "refusal": "I can't."}, "No.\nI can't.", None),
        ({"content": [{"type": "refusal", "refusal": "I can't."}]}, "I can't.", None),
        ({"content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab", None),
        ({"content": None, "audio": {"id": "a", "transcript": "Said."}}, "Said.", None),
        (
            {"content": "x", "annotations": [{"type": "url_citation"}], "status": "completed", "id": "m"},
            "x",
            None,
        ),
        ({"content": "x", "provider_specific_fields": {"citations": ["a"]}}, "x", None),
        ({"content": "x", "reasoning_content": "Hm."}, "x", "Hm."),
        (
            {"content": "x", "reasoning_details": [{"type": "a", "text": "Hm."}, {"type": "b", "data": "?"}]},
            "x",
            "Hm.",
        ),
        (
            {"content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
            "x",
            "Hm.",
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
                    {"type": "text", "text": "x"},
                ]
            },
            "x",
            "Hm.",
        ),
    ],
)
def test_an_earlier_answer(fields: dict[str, Any], content: str, reasoning: str | None) -> None:
    found = answer(**fields)
    assert (found["content"], found.get("reasoning")) == (content, reasoning)
    assert "tool_calls" not in found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": 7}, {"content": "7"}),
        ({"content": {"a": [1]}}, {"content": '{"a":[1]}'}),
        ({"content": "x", "tool_calls": [None]}, {"content": "x"}),
        ({"tool_calls": [None]}, {"content": ""}),
        ({"content": "x", "prefix": True, "weight": 0, "stop_sequence": None}, {"content": "x"}),
        ({"content": "x", "tool_plan": "First look."}, {"content": "x", "reasoning": "First look."}),
    ],
)
def test_an_answer_in_a_form_of_others(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = answer(**fields)
    assert {name: found.get(name) for name in expected} == expected
    assert not found.get("tool_calls")


@pytest.mark.parametrize(
    "call", [{"id": "a", "type": "function"}, {"id": "a", "function": {"arguments": "{}"}}]
)
def test_a_call_without_a_name(call: dict[str, Any]) -> None:
    (made,) = answer(tool_calls=[call])["tool_calls"]
    assert made["function"]["name"] == "unknown"


def test_the_form_that_went_before_tool_calls() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    messages = told(HI, called, {"role": "function", "name": "f", "content": "r"}, answer_of_words(), HI)
    (call,) = messages[1]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "r", "name": "f"}


def test_parts_of_earlier_turns_that_hold_text() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        "b",
        {"type": "file", "content": [{"type": "text", "text": "c"}]},
    ]
    assert told({"role": "user", "content": parts}, answer_of_words(), HI)[0]["content"] == "a\nb\nc"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "messages[2].content[0].type"),
        ([{"role": "tool", "content": "r"}], "messages[2].tool_call_id"),
        ([{"role": "user", "content": None}], "messages[2].content"),
        ([HI, {"role": "assistant", "content": None}], "messages[3].content"),
    ],
)
def test_the_current_turn_is_judged_as_it_was_sent(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        told(HI, answer_of_words(), *messages)
    assert caught.value.param == param


def test_an_earlier_image_is_refused_by_name() -> None:
    """The model reads text: to pass over an image would change the question."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ApiError) as caught:
        told(image, answer_of_words(), HI)
    assert (caught.value.param, caught.value.code) == ("messages[0].content[0].type", "unsupported_field")


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "x", "mood": "?"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "argumens": "{}"}}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "mood": "?"}]},
        {"role": "tool", "content": "x", "mood": "?"},
    ],
)
def test_unknown_fields_are_refused_in_earlier_turns_too(turn: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="Unknown field"):
        told(HI, turn, answer_of_words(), HI)


def test_many_calls_without_results_take_linear_time() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "assistant", "tool_calls": [call] * 250}, {"role": "tool", "content": "r"}] * 100
    began = time.process_time()
    messages = told(HI, *turns, answer_of_words(), HI)
    assert time.process_time() - began < 3
    assert len({message["tool_call_id"] for message in messages if message["role"] == "tool"}) == 100


@pytest.mark.parametrize("kind", [["text"], [], {}, {"a": 1}, 3, True])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_type_that_is_no_text_is_refused_by_name(role: str, kind: Any) -> None:
    turn = {"role": role, "content": [{"type": kind, "text": "x"}]}
    with pytest.raises(ApiError) as caught:
        told(HI, turn, answer_of_words(), HI)
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content[0]")
