"""From items to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.responses.items import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    text_of,
)

BETWEEN_PARTS = "\n"
"""Between the text parts of what the model is told. Its own words are joined as it wrote them."""
SUMMARY = "Summary of the conversation so far:"


def chat_messages(instructions: str | None, given: str | Sequence[Item]) -> list[dict[str, Any]]:
    """The conversation: `instructions` first. Reasoning, text and calls of one turn are one message. So are a summary
    and the user's next words: many chat templates take no two messages of the user in a row."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    turn: dict[str, Any] | None = None
    summarized = False  # by the item before
    for item in given:
        follows_summary, summarized = summarized, isinstance(item, CompactionItem)
        if isinstance(item, CompactionItem):
            turn = None
            text = f"{SUMMARY}\n{item.summary}"
            if follows_summary:
                add_user_text(messages, text)
            else:
                messages.append({"role": "user", "content": text})
        elif isinstance(item, MessageItem) and item.role == "user" and follows_summary:
            add_user_text(messages, text_of(item.content, between=BETWEEN_PARTS))
        elif isinstance(item, FunctionCallOutputItem):
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


def add_user_text(messages: list[dict[str, Any]], text: str) -> None:
    """Adds to the user's last message if the conversation ends with it."""
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": "user", "content": text})


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
