"""The OpenAPI document accepts and refuses what the server does, where fields of a request depend on each other."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from pydantic import ValidationError

from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from support.http.data_plane import DataPlane

HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", **TOOL, "function": {"name": "f", "arguments": "{}"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
CHATS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"messages": [{"role": "user"}]}, False),
    ({"messages": [{"role": "user", "content": None}]}, False),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}, True),
    ({"messages": [{"role": "tool", "content": "4"}]}, False),
    ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]}, True),
    ({"messages": [{**HELLO, "tool_call_id": "c"}]}, False),
    ({"messages": [{**HELLO, "tool_call_id": None}]}, True),
    ({"top_logprobs": 2}, False),
    ({"top_logprobs": 2, "logprobs": False}, False),
    ({"top_logprobs": 2, "logprobs": True}, True),
    ({"top_logprobs": 0}, True),
    ({"stream_options": {"include_usage": True}}, False),
    ({"stream_options": {"include_usage": True}, "stream": True}, True),
    ({"stream_options": {"include_usage": False}}, True),
    ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, True),
    (
        {"stream_options": {"continuous_usage_stats": True, "include_usage": False}, "stream": True},
        False,
    ),
    ({"tools": [TOOL]}, True),
    ({"tools": [TOOL], "tool_choice": "none"}, True),
    ({"tools": [TOOL], "tool_choice": "required"}, True),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, False),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, False),
    ({"tools": [TOOL], "tool_choice": ALLOWED}, True),
    ({"tool_choice": "required"}, False),
    ({"tools": [], "tool_choice": ALLOWED}, False),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, True),
    ({"messages": [{"role": "assistant"}]}, False),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, False),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, True),
    ({"messages": [{"role": "assistant", "content": None, "reasoning": "Hm."}]}, True),
    ({"messages": [{**HELLO, "tool_calls": [CALL]}]}, False),
    ({"messages": [{**HELLO, "tool_calls": [], "reasoning": None}]}, True),
    ({"messages": [{**HELLO, "reasoning_content": "Hm."}]}, False),
    ({"prompt_logprobs": 1}, True),
    ({"prompt_logprobs": 1, "stream": False}, True),
    ({"prompt_logprobs": 1, "stream": True}, False),
    ({"logprob_token_ids": [1]}, False),
    ({"logprob_token_ids": [1], "logprobs": True}, True),
    ({"logit_bias": {"12": 5}}, True),
    ({"logit_bias": {"word": 5}}, False),
    ({"logit_bias": {"12": 101}}, False),
]
COMPLETIONS: list[tuple[dict[str, Any], bool]] = [
    ({"max_tokens": 0}, False),
    ({"max_tokens": 0, "echo": True}, True),
    ({"max_tokens": 1}, True),
    ({"logprob_token_ids": [1]}, False),
    ({"logprob_token_ids": [1], "logprobs": 0}, True),
    ({"logprob_token_ids": [1], "logprobs": 0, "max_tokens": 0, "echo": True}, False),
    ({"stream_options": {"include_usage": True}}, False),
]


@pytest.fixture(scope="module")
def document(shared_plane: DataPlane) -> dict[str, Any]:
    found: dict[str, Any] = shared_plane.http.get(f"{shared_plane.url}/openapi.json").json()
    return found


def agree(
    document: dict[str, Any],
    kind: type[ChatRequest] | type[CompletionRequest],
    body: dict[str, Any],
    valid: bool,
) -> None:
    schema = {
        "$ref": f"#/components/schemas/{kind.__name__}",
        "components": document["components"],
    }
    said = jsonschema_rs.validator_for(schema).is_valid(body)
    try:
        kind.model_validate(body)
        taken = True
    except ValidationError:
        taken = False
    assert (said, taken) == (valid, valid)


@pytest.mark.parametrize(("fields", "valid"), CHATS)
def test_chats(document: dict[str, Any], fields: dict[str, Any], valid: bool) -> None:
    agree(document, ChatRequest, {"model": "m", "messages": [HELLO]} | fields, valid)


@pytest.mark.parametrize(("fields", "valid"), COMPLETIONS)
def test_completions(document: dict[str, Any], fields: dict[str, Any], valid: bool) -> None:
    agree(document, CompletionRequest, {"model": "m", "prompt": "x"} | fields, valid)


def test_each_default_is_one_that_the_field_takes(document: dict[str, Any]) -> None:
    parts = {"components": document["components"]}
    given = {
        (name, field): its
        for name, schema in parts["components"]["schemas"].items()
        for field, its in schema.get("properties", {}).items()
        if its.get("default") is not None  # a null is as left out
    }
    assert ("ChatRequest", "logit_bias") in given
    for place, its in given.items():
        assert jsonschema_rs.validator_for(its | parts).is_valid(its["default"]), place
