"""Other ways to tell a template of a conversation whose earlier turns it refuses.

Templates insist on ids of nine letters and digits, on one call in a turn, or on turns that alternate. What earlier
turns say stays the same, and the turn that is asked for stays as it is: where the template refuses that, it refuses the
conversation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from loraplex.serving.text.tool_rendering import Message, ToolRendering, past_end

ID_LENGTH = 9
_ID = re.compile(rf"[A-Za-z0-9]{{{ID_LENGTH}}}")
_JOINTS = {"system": "\n\n", "user": "\n\n", "assistant": "\n"}
"""Roles whose neighbours may be one message, with the string between their texts."""


def simpler(
    messages: Sequence[Message], rendering: ToolRendering | None
) -> Iterator[tuple[Sequence[Message], ToolRendering | None]]:
    """Messages and rendering to try, from the nearest to what was given, without those that say the same. The last way
    tells of earlier calls and results in words."""
    short = [_with_short_ids(message) for message in messages]
    joined = _joined(short)
    written = in_words = rendering
    if rendering is not None:
        if any(message.get("tool_calls") for message in messages):
            written = replace(rendering, calls="written")
        has_results = any(message["role"] == "tool" for message in messages[: past_end(messages)])
        in_words = replace(written or rendering, past_in_words=has_results and rendering.shows_results)
    tried = [(list(messages), rendering)]
    for way in ((short, rendering), (tried[0][0], written), (joined, rendering), (joined, in_words)):
        if way not in tried:
            tried.append(way)
            yield way


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        calls = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(label: str) -> str:
    return (
        label
        if _ID.fullmatch(label)
        else hashlib.sha256(label.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]
    )


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role in earlier turns as one message. A turn that calls is followed by results alone."""
    end = past_end(messages)
    runs: list[list[Message]] = []
    for place, message in enumerate(messages):
        last = runs[-1][-1] if runs else None
        same = last is not None and last["role"] == message["role"] in _JOINTS and not last.get("tool_calls")
        if same and place < end:
            runs[-1].append(message)
        else:
            runs.append([message])
    return [_one(run) if len(run) > 1 else run[0] for run in runs]


def _one(run: Sequence[Message]) -> Message:
    made: dict[str, Any] = {**run[-1]}
    for field in ("content", "reasoning", "reasoning_content"):
        texts = [message[field] for message in run if message.get(field)]
        if texts:
            made[field] = _JOINTS[made["role"]].join(texts)
    return made
