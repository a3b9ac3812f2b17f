"""The OpenAPI document accepts and refuses what the server does, where fields of a request depend on each other."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from pydantic import ValidationError

from loraplex.api.openapi import openapi
from loraplex.api.schemas import ChatRequest, CompletionRequest

HELLO = {"role": "user", "content": "Hello"}
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
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, True),
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


def agree(kind: type[ChatRequest] | type[CompletionRequest], body: dict[str, Any], valid: bool) -> None:
    document = openapi(metrics=False)
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
def test_chats(fields: dict[str, Any], valid: bool) -> None:
    agree(ChatRequest, {"model": "m", "messages": [HELLO]} | fields, valid)


@pytest.mark.parametrize(("fields", "valid"), COMPLETIONS)
def test_completions(fields: dict[str, Any], valid: bool) -> None:
    agree(CompletionRequest, {"model": "m", "prompt": "x"} | fields, valid)
