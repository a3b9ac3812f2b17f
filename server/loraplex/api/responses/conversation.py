"""From items to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
BETWEEN_USER_TEXTS = "\n\n"
SUMMARY_HEADING = "Summary of the conversation so far:"


@dataclass(slots=True)
class _Turn:
    """A message while its items are collected. `texts` are joined by `between` at the end."""

    role: str
    texts: list[str] = field(default_factory=list)
    between: str = BETWEEN_USER_TEXTS
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None
    has_summary: bool = False

    def message(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": self.role}
        if self.call_id is not None:
            made["tool_call_id"] = self.call_id
        if self.reasoning:
            made["reasoning"] = "".join(self.reasoning)
        if self.texts:
            made["content"] = self.between.join(self.texts)
        if self.calls:
            made["tool_calls"] = self.calls
        return made


def chat_messages(
    instructions: str | None, given: str | Sequence[Item], *, request: str | None = None
) -> list[dict[str, Any]]:
    """The conversation: `instructions` first, `request` as the user's last words. Reasoning, text and calls of one turn
    are one message. So are a summary and what the user says beside it: many chat templates take no two messages of the
    user in a row."""
    turns: list[_Turn] = []
    if instructions is not None:
        turns.append(_Turn("system", [instructions]))
    if isinstance(given, str):
        turns.append(_Turn("user", [given]))
    else:
        for item in given:
            _add(turns, item)
    if request is not None:
        _user_turn(turns).texts.append(request)
    return [turn.message() for turn in turns]


def _add(turns: list[_Turn], item: Item) -> None:
    if isinstance(item, ReasoningItem) and not item.text:
        return
    if isinstance(item, CompactionItem):
        turn = _user_turn(turns)
        turn.texts.append(f"{SUMMARY_HEADING}\n{item.summary}")
        turn.has_summary = True
    elif isinstance(item, FunctionCallOutputItem):
        turns.append(_Turn("tool", [text_of(item.output, between=BETWEEN_PARTS)], call_id=item.call_id))
    elif isinstance(item, MessageItem) and item.role != "assistant":
        text = text_of(item.content, between=BETWEEN_PARTS)
        if item.role == "user" and turns and turns[-1].has_summary:
            turns[-1].texts.append(text)
        else:
            turns.append(_Turn(item.role, [text]))
    else:
        _add_to_answer(_assistant_turn(turns, item), item)


def _user_turn(turns: list[_Turn]) -> _Turn:
    """The user's last one where the conversation ends with it, or a new one."""
    if not turns or turns[-1].role != "user":
        turns.append(_Turn("user"))
    return turns[-1]


def _assistant_turn(turns: list[_Turn], item: Item) -> _Turn:
    """The model's last one where the conversation ends with it, or a new one. Reasoning behind a text or a call begins
    one."""
    last = turns[-1] if turns else None
    begins = isinstance(item, ReasoningItem) and last is not None and bool(last.texts or last.calls)
    if last is None or last.role != "assistant" or begins:
        turns.append(_Turn("assistant", between=""))
    return turns[-1]


def _add_to_answer(turn: _Turn, item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    """Adds what the model said."""
    if isinstance(item, MessageItem):
        turn.texts.append(text_of(item.content, between=""))
    elif isinstance(item, ReasoningItem):
        turn.reasoning.append(item.text)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.calls.append({"id": item.call_id, "type": "function", "function": function})
