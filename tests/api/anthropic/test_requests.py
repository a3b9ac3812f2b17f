"""What a request to /v1/messages becomes, and what is refused by name. The messages are those that the chat template
gets."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loraplex.api.anthropic.schemas import CountRequest, MessagesRequest, to_chat
from loraplex.api.errors import ApiError
from loraplex.api.openai.parsing import parse_request
from loraplex.api.sealed import seal

ADD = {"name": "add", "input_schema": {"type": "object"}}
HI = {"role": "user", "content": "hi"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def asked(**fields: Any) -> MessagesRequest:
    return parse_request(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [HI], **fields})


def chat(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in asked(**fields).for_chat().items() if value is not None}


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def text(said: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **others}


def test_a_conversation_with_tools() -> None:
    given = [
        {"role": "user", "content": [text("a"), text("b", **CACHED)]},
        {"role": "user", "content": "c"},
        {"role": "system", "content": [text("From now on: short.", **CACHED)]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "anything"},
                text("I add."),
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": "ü"}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "2", **CACHED},
                {"type": "tool_result", "tool_use_id": "t2", "content": [text("no")], "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("Go on."),
            ],
        },
    ]
    fields = chat(messages=given, system=[text("Be brief."), text("Be kind.", **CACHED)])
    assert fields["messages"] == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "system", "content": "From now on: short."},
        {
            "role": "assistant",
            "reasoning": "Hm.",
            "content": "I add.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":"ü"}'}},
                {"id": "t2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "2"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "somebody's"},
        {"type": "thinking", "thinking": "", "signature": seal("Hm.")},
        {"type": "redacted_thinking", "data": seal("Hm.")},
    ],
)
def test_thinking_comes_back(block: dict[str, Any]) -> None:
    messages = chat(messages=[HI, {"role": "assistant", "content": [block, text("4")]}, HI])["messages"]
    assert messages[1] == {"role": "assistant", "reasoning": "Hm.", "content": "4"}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "redacted_thinking", "data": "somebody's"},
        {"type": "redacted_thinking"},
        {"type": "thinking", "thinking": "", "signature": "somebody's"},
        {"type": "thinking", "thinking": None},
    ],
)
def test_thinking_that_holds_nothing_here_is_left_out(block: dict[str, Any]) -> None:
    messages = chat(messages=[HI, {"role": "assistant", "content": [block, text("4")]}, HI])["messages"]
    assert messages[1] == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"a": "half', '{"a": "half'),
        (None, "{}"),
        ([1], "[1]"),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a":1}'),
    ],
)
def test_an_earlier_call_goes_in_as_it_was_written(given: Any, arguments: str) -> None:
    call = {"type": "tool_use", "id": "t", "name": "add", "input": given, "thought_signature": "x"}
    called = {"role": "assistant", "content": [call]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "no"}]}
    messages = to_chat(asked(messages=[HI, called, result])).messages
    assert (messages[1].tool_calls or [])[0].function.arguments == arguments


def test_earlier_turns_of_other_servers() -> None:
    cited = text("It is 4.", citations=[{"type": "char_location"}])
    found = {"type": "search_result", "source": "s", "title": "t", "content": [text("a"), text("b")]}
    given = [
        {"role": "user", "content": [text("How many?"), {"type": "container_upload", "text": "a file"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "add", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [found]}]},
        {"role": "assistant", "content": [cited]},
        HI,
        {"role": "assistant", "content": []},
        HI,
    ]
    told = [message.for_template() for message in to_chat(asked(messages=given)).messages]
    assert [message["content"] for message in told] == [
        "How many?\na file",
        "",
        "a\nb",
        "It is 4.",
        "hi",
        "",
        "hi",
    ]
    assert told[2]["tool_call_id"] == told[1]["tool_calls"][0]["id"]
    # The turn that is asked for is judged as it was sent.
    for current in (found, {"type": "container_upload", "text": "a file"}):
        assert refused(
            messages=[HI, {"role": "assistant", "content": "x"}, {"role": "user", "content": [current]}]
        )


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            '{"type":"server_tool_use","name":"web_search","input":{"query":"x"}}',
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [
                    {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e"}
                ],
            },
            '{"type":"web_search_tool_result","tool_use_id":"s",'
            '"content":[{"type":"web_search_result","url":"u","title":"t"}]}',
        ),
        (
            {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [text("r")]},
            '{"type":"mcp_tool_result","tool_use_id":"m","content":[{"type":"text","text":"r"}]}',
        ),
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "abc"}}, "abc"),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "a\nb"),
    ],
)
def test_what_another_server_did_itself_goes_in_as_text(block: dict[str, Any], said: str) -> None:
    role = "user" if block["type"] == "document" else "assistant"
    messages = [HI, {"role": role, "content": [block]}, {"role": "assistant", "content": "k"}, HI]
    assert said in "\n".join(message["content"] for message in chat(messages=messages)["messages"])


def test_a_whole_answer_of_the_client_library_is_an_earlier_turn() -> None:
    whole = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "x", "content": [text("k")],
        "stop_reason": "end_turn", "stop_sequence": None, "usage": {}, "container": None,
    }  # fmt: skip
    assert chat(messages=[HI, whole, HI])["messages"][1] == {"role": "assistant", "content": "k"}
    assert refused(messages=[HI, {**whole, "mood": "?"}, HI]).param == "messages[1].mood"


def test_sampling_has_the_names_of_chat() -> None:
    fields = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=7,
        speculation=False,
        stop_sequences=["x", "y", "x"],
        stream=True,
        metadata={"user_id": "u"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        thinking={"type": "adaptive", "display": "omitted"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )
    del fields["messages"]
    assert fields == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
        "speculation": False,
        "logit_bias": {},
        "stop": ["x", "y"],
        "stream": True,
        "user": "u",
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert chat(thinking={"type": "disabled"})["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    ("choice", "becomes", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", True),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}, True),
        ({"type": "none"}, "none", True),
    ],
)
def test_choices(choice: Any, becomes: Any, parallel: bool) -> None:
    tool = {**ADD, "description": "Adds.", "strict": True, "type": "custom", "eager_input_streaming": True}
    fields = chat(tools=[tool], tool_choice=choice)
    assert fields["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "add",
                "parameters": {"type": "object"},
                "description": "Adds.",
                "strict": True,
            },
        }
    ]
    assert (fields["tool_choice"], fields["parallel_tool_calls"]) == (becomes, parallel)


def test_a_deferred_tool_is_offered_once_a_result_names_it() -> None:
    tools = [{**ADD, "name": "later", "defer_loading": True}, {**ADD, "name": "search"}]
    assert [tool["function"]["name"] for tool in chat(tools=tools)["tools"]] == ["search"]
    assert (
        asked(tools=tools).client_field("tools[0].function.parameters.type") == "tools[1].input_schema.type"
    )
    found = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "later"}],
    }
    fields = chat(tools=tools, messages=[HI, {"role": "user", "content": [found]}])
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["later", "search"]
    assert "later" in fields["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"max_tokens": None}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [HI, {"role": "assistant", "content": "The"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_field",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_field",
        ),
        (
            {"messages": [HI, {"role": "assistant", "content": [{"type": "server_tool_use"}]}, HI]},
            "messages[1].content[0].type",
            "unsupported_field",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type", "unsupported_field"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "unsupported_field"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema", "invalid_value"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
        (
            {"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}},
            "tool_choice.name",
            "invalid_value",
        ),
        ({"tools": [ADD], "tool_choice": {"type": "maybe"}}, "tool_choice.type", "unsupported_field"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "unsupported_field"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "invalid_value"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
            "unsupported_field",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"value": 1}}]}},
            "context_management.edits[0].keep",
            "invalid_value",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "unsupported_field"),
        ({"container": "c"}, "container", "unsupported_field"),
        ({"speed": "fast"}, "speed", "unsupported_field"),
        ({"nobody": 1}, "nobody", "unsupported_field"),
        ({"stop_sequences": ["x" * 257]}, "stop_sequences[0]", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], field: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (field, code)
    assert error.message.endswith(".")


def test_counting_needs_no_length_and_takes_any_last_message() -> None:
    given = {"model": "m", "messages": [HI, {"role": "assistant", "content": "The"}]}
    assert parse_request(CountRequest, given).for_chat()["messages"][1]["content"] == "The"
    with pytest.raises(ApiError) as caught:
        parse_request(CountRequest, given | {"max_tokens": 5})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_many_blocks_of_one_turn_take_linear_time(role: str) -> None:
    """To lengthen a text with each of them would copy some 10 GB."""
    blocks = [text("x" * 40)] * 2000
    if role == "assistant":
        blocks = [*blocks, *[{"type": "thinking", "thinking": "x" * 40, "signature": ""}] * 2000]
    request = asked(messages=[{"role": role, "content": blocks}] * 20 + [HI])
    began = time.process_time()
    first = request.for_chat()["messages"][0]
    assert time.process_time() - began < 1
    assert len(first["content"]) >= 20 * 2000 * 40


def test_many_references_take_linear_time() -> None:
    parts = [[{"type": "tool_reference", "tool_name": f"{m}-{n}"} for n in range(20)] for m in range(2500)]
    turns = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": part}]}
        for part in parts
    ]
    request = asked(messages=turns)
    began = time.process_time()
    request.offer()
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("kind", [["text"], [], {}])
def test_a_type_that_is_no_text_is_refused_in_earlier_blocks(kind: Any) -> None:
    behind = [{"role": "assistant", "content": "x"}, HI]
    block = {"type": kind, "text": "x"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    for content, field in (([block], "content[0].type"), ([result], "content[0].content[0].type")):
        messages = [{"role": "user", "content": content}, *behind]
        assert refused(messages=messages).param == f"messages[0].{field}"
