"""From items to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    text_of,
)

BETWEEN_PARTS = "\n"
"""Between the text parts of what the model is told. Its own words are joined as it wrote them."""


def chat_messages(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation: `instructions` first. Reasoning, text and calls of one turn are one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    turn: dict[str, Any] | None = None
    for item in given:
        if isinstance(item, FunctionCallOutputItem):
            turn = None
            output = text_of(item.output, between=BETWEEN_PARTS)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            turn = None
            messages.append({"role": item.role, "content": text_of(item.content, between=BETWEEN_PARTS)})
        else:
            if turn is None or (isinstance(item, ReasoningItem) and set(turn) - {"role", "reasoning"}):
                turn = {"role": "assistant"}
                messages.append(turn)
            _add(turn, item)
    return messages


def _add(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    """Adds what the model said."""
    if isinstance(item, MessageItem):
        turn["content"] = turn.get("content", "") + text_of(item.content, between="")
    elif isinstance(item, ReasoningItem):
        turn["reasoning"] = turn.get("reasoning", "") + item.text
    else:
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
