"""Earlier items of `input`, brought into the form that items have, as `loraplex.api.openai.history` does with the
messages of chats."""

from __future__ import annotations

import re
from typing import Any

from loraplex.api.openai.history import (
    CallIds,
    as_json,
    call_arguments,
    call_name,
    others,
    past_length,
    result_text,
    text_part,
)
from loraplex.api.sealed import unseal

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items that are calls, with the field of their arguments."""
_RESULTS = ("function_call_output", "custom_tool_call_output")

_HOSTED_CALL = re.compile(r"(?!image_|computer_)\w{1,40}_call")
"""Kinds of calls of tools that another server has. Images have no form here."""
_HOSTED_RESULT = re.compile(r"(?!computer_)\w{1,40}_(?:call_)?output")
_WITHOUT_WORDS = ("mcp_list_tools", "mcp_approval_request", "mcp_approval_response")
"""Kinds of items that say nothing of what the model wrote or read."""
_ASKED = ("arguments", "action", "operation", "input")

Json = dict[str, Any]


def mended(given: object) -> object:
    """The items of `input`, with those of earlier turns mended."""
    if not isinstance(given, list):
        return given
    ids, end = CallIds(), past_length(given, _is_models)
    return [
        item if not isinstance(item, dict) else _past(item, ids) if place < end else _current(item, ids)
        for place, item in enumerate(given)
    ]


def _is_models(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    kind = item.get("type", "message")
    if kind in ("reasoning", *_CALLS, *_WITHOUT_WORDS[:2]) or item.get("role") == "assistant":
        return True
    return isinstance(kind, str) and _HOSTED_CALL.fullmatch(kind) is not None


def _current(item: Json, ids: CallIds) -> Json:
    """A result may have the long id of an earlier call."""
    given = item.get("call_id")
    return {**item, "call_id": ids.of_result(given)} if isinstance(given, str) and given else item


def _past(item: Json, ids: CallIds) -> Json:
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        return item
    if kind in _CALLS:
        return {
            "type": "function_call",
            "call_id": ids.of_call(item.get("call_id") or item.get("id")),
            "name": call_name(item.get("name")),
            "arguments": call_arguments(item.get(_CALLS[kind])),
            **others(item, "type", "call_id", "name", _CALLS[kind]),
        }
    if kind in _RESULTS:
        return {
            "type": "function_call_output",
            "call_id": ids.of_result(item.get("call_id")),
            "output": result_text(item.get("output"), "input_text"),
            **others(item, "type", "call_id", "output"),
        }
    if kind == "reasoning" or kind in _WITHOUT_WORDS:
        return _reasoning(item if kind == "reasoning" else {"type": "reasoning"})
    if kind != "message":
        return _hosted(item, kind, ids)
    part_kind = "output_text" if item.get("role") == "assistant" else "input_text"
    given = item.get("content")
    content = [text_part(part, part_kind) for part in given] if isinstance(given, list) else given
    return {**others(item), "content": "" if content is None else content}


def _hosted(item: Json, kind: str, ids: CallIds) -> Json:
    """A call of another server's tool, or its result: as a call and a result where the client ran it, else as text."""
    if _HOSTED_RESULT.fullmatch(kind):
        label = ids.of_result(item.get("call_id") or item.get("id"))
        output = result_text(item.get("output"), "input_text")
        return {"type": "function_call_output", "call_id": label, "output": output}
    if not _HOSTED_CALL.fullmatch(kind):
        return item
    if "call_id" in item:
        asked = next((item[name] for name in _ASKED if name in item), None)
        return {
            "type": "function_call",
            "call_id": ids.of_call(item["call_id"]),
            "name": call_name(item.get("name") or kind.removesuffix("_call")),
            "arguments": call_arguments(asked),
        }
    text = as_json(item)
    return item if text is None else {"type": "message", "role": "assistant", "content": text}


def _reasoning(item: Json) -> Json:
    """Leave out content that another server has sealed: it holds nothing here."""
    made: Json = {**others(item), "encrypted_content": None}
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and unseal(sealed) is not None:
        made["encrypted_content"] = sealed
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(name)
        parts = given if isinstance(given, list) else [] if given is None else [given]
        made[name] = [text_part(part, kind) for part in parts]
    return made
