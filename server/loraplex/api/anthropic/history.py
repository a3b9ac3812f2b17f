"""Messages of earlier turns, brought into the form that messages have, as `loraplex.api.openai.history` does with those
of chats."""

from __future__ import annotations

import re
from typing import Any

from loraplex.api.openai.history import (
    CallIds,
    as_json,
    call_arguments,
    call_name,
    held_text,
    others,
    past_length,
    result_text,
    text_part,
)

_OF_SERVERS = re.compile(r"\w{1,40}_tool_(?:use|result)")
"""Kinds of calls that another server made itself, and of their results."""

Json = dict[str, Any]


def mended(given: object) -> object:
    """The messages, with those of earlier turns mended."""
    if not isinstance(given, list):
        return given
    ids = CallIds()
    end = past_length(given, lambda turn: isinstance(turn, dict) and turn.get("role") == "assistant")
    return [
        _mended(turn, ids, is_past=place < end) if isinstance(turn, dict) else turn
        for place, turn in enumerate(given)
    ]


def _mended(turn: Json, ids: CallIds, *, is_past: bool) -> Json:
    content = turn.get("content")
    if is_past and turn.get("type") == "message":
        turn = others(turn, "type", "container", "context_management")
    if isinstance(content, list):
        mend = _past if is_past else _current
        return {**turn, "content": [mend(block, ids) for block in content]}
    return {**turn, "content": ""} if is_past and content is None else turn


def _current(block: object, ids: CallIds) -> object:
    """A result may have the long id of an earlier call."""
    given = block.get("tool_use_id") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(given, str) or not given:
        return block
    return {**block, "tool_use_id": ids.of_result(given)}


def _past(block: object, ids: CallIds) -> object:
    if not isinstance(block, dict):
        return text_part(block)
    match block.get("type"):
        case "tool_use":
            made: Json
            given, label = block.get("input"), ids.of_call(block.get("id"))
            written = given if isinstance(given, dict) else call_arguments(given)
            made = {"type": "tool_use", "id": label, "name": call_name(block.get("name")), "input": written}
            return made | others(block, "type", "name", "input")
        case "tool_result":
            content, label = result_text(block.get("content")), ids.of_result(block.get("tool_use_id"))
            made = {"type": "tool_result", "tool_use_id": label, "content": content}
            return made | others(block, "type", "tool_use_id", "content")
        case "thinking" | "redacted_thinking":
            texts = {
                "thinking": block.get("thinking"),
                "signature": block.get("signature", block.get("data")),
            }
            shown = {name: text if isinstance(text, str) else "" for name, text in texts.items()}
            return {"type": "thinking", **shown, **others(block, "type", "thinking", "data")}
        case str(kind) if _OF_SERVERS.fullmatch(kind) and (text := as_json(block)):
            return {"type": "text", "text": text}
        case "document" if (text := _document_text(block.get("source"))) is not None:
            return {"type": "text", "text": text}
        case _:
            return text_part(block)


def _document_text(source: object) -> str | None:
    if not isinstance(source, dict) or source.get("type") not in ("text", "content"):
        return None
    return held_text(source.get("data", source.get("content")))
