"""From content blocks to the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.api.anthropic.blocks import (
    AssistantMessage,
    Message,
    SystemMessage,
    SystemText,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    text_of,
)
from loraplex.api.codec import dumps

FAILED = "Error: "
"""Before the content of a tool's result that is an error."""


def chat_messages(system: SystemText | None, given: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation: `system` first. Neighbours of one role are one turn, as in Anthropic's API."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": text_of(system)})
    for message in given:
        if isinstance(message, SystemMessage):
            messages.append({"role": "system", "content": text_of(message.content)})
        elif isinstance(message, UserMessage):
            _add_user(messages, message)
        else:
            _add_assistant(messages, message)
    # Joined once: to lengthen a text with each block would take the square of its length.
    return [_joined(message) for message in messages]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    between = "\n" if message["role"] == "user" else ""
    return {
        name: between.join(value) if name in ("content", "reasoning") and isinstance(value, list) else value
        for name, value in message.items()
    }


def _add_user(messages: list[dict[str, Any]], message: UserMessage) -> None:
    blocks = (
        [TextBlock(type="text", text=message.content)]
        if isinstance(message.content, str)
        else message.content
    )
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            result = (FAILED if block.is_error else "") + text_of(block.content or "")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(block.text)
        else:
            messages.append({"role": "user", "content": [block.text]})


def _add_assistant(messages: list[dict[str, Any]], message: AssistantMessage) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    turn = messages[-1]
    if isinstance(message.content, str):
        turn.setdefault("content", []).append(message.content)
        return
    for block in message.content:
        if isinstance(block, TextBlock):
            turn.setdefault("content", []).append(block.text)
        elif isinstance(block, ToolUseBlock):
            given = block.input if isinstance(block.input, str) else dumps(block.input).decode()
            function = {"name": block.name, "arguments": given}
            call = {"id": block.id, "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif block.text:
            turn.setdefault("reasoning", []).append(block.text)
