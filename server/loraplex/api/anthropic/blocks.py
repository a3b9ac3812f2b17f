"""The content blocks of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loraplex.api.anthropic.history import mended
from loraplex.api.openai.messages import MAX_MESSAGES, Name
from loraplex.api.openai.schemas import Hint
from loraplex.api.openai.strict import Strict
from loraplex.api.openai.unions import by_type, kind, of_kinds, text_or
from loraplex.api.sealed import unseal

OF_OTHER_CALLERS: Mapping[str, tuple[object, ...]] = {
    "caller": ({"type": "direct"},),
    "toolset_name": (),
}


class CacheControl(Strict):
    """A hint: equal beginnings are always found."""

    type: Literal["ephemeral"]
    ttl: Hint | None = None
    scope: Hint | None = None


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    UNSUPPORTED = {"citations": ()}  # noqa: RUF012 - a class variable of Strict


class ToolReferenceBlock(Strict):
    """Loads a tool whose loading was deferred."""

    type: Literal["tool_reference"]
    tool_name: Name
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be called now."


class ThinkingBlock(Strict):
    """The model's thinking of an earlier turn: `thinking`, or what this server has sealed in `signature`."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return self.thinking or unseal(self.signature) or ""


class RedactedThinkingBlock(Strict):
    type: Literal["redacted_thinking"]
    data: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        return unseal(self.data) or ""


class ToolUseBlock(Strict):
    """An earlier call. `input` is text where the model wrote no object."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Annotated[
        Annotated[dict[str, Any], kind("object")] | Annotated[str, kind("text")], text_or("object")
    ]
    cache_control: CacheControl | None = None
    UNSUPPORTED = OF_OTHER_CALLERS


_ResultPart = Annotated[
    Annotated[TextBlock, kind("text")] | Annotated[ToolReferenceBlock, kind("tool_reference")],
    by_type(),
    BeforeValidator(of_kinds("content blocks", {"text", "tool_reference"})),
]
_ResultParts = Annotated[list[_ResultPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: (
        Annotated[Annotated[str, kind("text")] | Annotated[_ResultParts, kind("list")], text_or("list")]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    UNSUPPORTED = OF_OTHER_CALLERS

    @property
    def references(self) -> frozenset[str]:
        """Tools that this result loads."""
        parts = self.content if isinstance(self.content, list) else []
        return frozenset(part.tool_name for part in parts if isinstance(part, ToolReferenceBlock))


def _blocks(*kinds: str) -> BeforeValidator:
    return BeforeValidator(of_kinds("content blocks", kinds))


_UserBlock = Annotated[
    Annotated[TextBlock, kind("text")] | Annotated[ToolResultBlock, kind("tool_result")],
    by_type(),
    _blocks("text", "tool_result"),
]
_AssistantBlock = Annotated[
    Annotated[TextBlock, kind("text")]
    | Annotated[ThinkingBlock, kind("thinking")]
    | Annotated[RedactedThinkingBlock, kind("redacted_thinking")]
    | Annotated[ToolUseBlock, kind("tool_use")],
    by_type(),
    _blocks("text", "thinking", "redacted_thinking", "tool_use"),
]
_SystemBlock = Annotated[TextBlock, _blocks("text")]
_UserBlocks = Annotated[list[_UserBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
_AssistantBlocks = Annotated[list[_AssistantBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
SystemBlocks = Annotated[list[_SystemBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]
SystemText = Annotated[Annotated[str, kind("text")] | Annotated[SystemBlocks, kind("list")], text_or("list")]


class UserMessage(Strict):
    role: Literal["user"]
    content: Annotated[Annotated[str, kind("text")] | Annotated[_UserBlocks, kind("list")], text_or("list")]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, kind("text")] | Annotated[_AssistantBlocks, kind("list")], text_or("list")
    ]


class SystemMessage(Strict):
    """Instructions from its place in the conversation on."""

    role: Literal["system"]
    content: SystemText


Message = Annotated[
    Annotated[UserMessage, kind("user")]
    | Annotated[AssistantMessage, kind("assistant")]
    | Annotated[SystemMessage, kind("system")],
    by_type(field="role"),
    BeforeValidator(of_kinds("messages", {"user", "assistant", "system"}, field="role")),
]
Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), BeforeValidator(mended)
]


def text_of(content: str | Sequence[TextBlock | ToolReferenceBlock]) -> str:
    """The text of all blocks, each on lines of its own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
