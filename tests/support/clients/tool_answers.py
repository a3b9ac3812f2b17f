"""What each outside client must have told of its tools and of answers with a type (tests/clients/scripts)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.clients.outside_clients import CITY, SAID, WEATHER

CALLS = [["weather", CITY]]
TURN = {"finish": "tool_calls", "text": None, "calls": CALLS, "said": SAID}
MESSAGES = {"stop": ["tool_use", "end_turn"], "blocks": [CALLS, [SAID]]}


def _refused(param: str) -> dict[str, Any]:
    return {"class": "BadRequestError", "status": 400, "code": "unsupported_field", "param": param}


def _response(text: str, calls: list[Any]) -> dict[str, Any]:
    return {"status": "completed", "text": text, "calls": calls}


def _ai_sdk() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("compatible", "chat", "responses", "messages"):
        found |= {f"{name}_tool": {"text": SAID, "calls": CALLS}}
        found |= {f"{name}_tool_streamed": {"text": SAID, "calls": CALLS}}
        if name != "messages":
            found[f"{name}_object"] = WEATHER
    return found | {
        "openai_parse": WEATHER,
        "openai_run_tools": SAID,
        "openai_responses": {"text": SAID, "whole": SAID},
        "anthropic_stream": {"stop": "tool_use", "calls": CALLS},
    }


ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "openai_agents": {
        "chat_parse": WEATHER,
        "chat_tools": TURN,
        "chat_tools_required": TURN,
        # OpenAI's own answer to a function that was named.
        "chat_tools_named": {**TURN, "finish": "stop"},
        "chat_stream": {"finish": "tool_calls", "calls": CALLS, "streamed": CITY},
        "responses": _response(SAID, []),
        "responses_stream": {"text": SAID, "first": "response.created", "last": "response.completed"},
        "responses_tools": {"first": _response("", CALLS), "second": _response(SAID, [])},
        "responses_parse": WEATHER,
        "responses_store": _refused("store"),
        "responses_previous": _refused("previous_response_id"),
        "messages": MESSAGES,
        "messages_stream": MESSAGES,
        "messages_count": len("<user\nWhat is the weather in Bonn?>\n<assistant\n"),
        "agent_chat": SAID,
        "agent_chat_typed": WEATHER,
        "agent_responses": SAID,
        "agent_responses_typed": WEATHER,
    },
    "pydantic_ai": {
        **{f"{wire}_tool": SAID for wire in ("chat", "responses", "messages")},
        **{f"{wire}_typed_by_tool": WEATHER for wire in ("chat", "responses", "messages")},
        **{f"{wire}_typed": WEATHER for wire in ("chat", "responses")},
    },
    "instructor": dict.fromkeys(("tools", "tools_streamed", "json_schema", "json"), WEATHER),
    "ai_sdk": _ai_sdk(),
}
