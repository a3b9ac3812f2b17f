"""Messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from loraplex.api.openai import described
from loraplex.api.openai.history import is_object, mended, past_length
from loraplex.api.openai.strict import (
    Strict,
    is_empty,
    must,
    or_neutral,
    refuse,
    refuse_unknown,
    refuse_unsupported,
)
from loraplex.http.text import printable

MAX_MESSAGES = 4096
MAX_CALLS = 256
"""Most tool calls of one message."""

UNSUPPORTED_MESSAGE: Mapping[str, tuple[object, ...]] = {
    "annotations": (),
    "audio": (),
    "function_call": (),
    "provider_specific_fields": ({"refusal": None},),  # LiteLLM's, in an answer that it sends back
    "refusal": (),
}


def _text(value: object, info: ValidationInfo) -> object:
    """Content as one string. Text parts stand on lines of their own; those of the model are joined as it wrote them."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_MESSAGES:
        raise must(f"must have at most {MAX_MESSAGES} parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            refuse(f"[{index}]", "Each content part must be an object with a 'type'.")
        if kind != "text":
            refuse_unsupported(
                f"[{index}].type", f"Content parts of type '{printable(kind)}' are not supported."
            )
        strange = [name for name in part if name not in TextPart.KNOWN]
        for name in strange:
            if not is_empty(part[name]) or len(part) > TextPart.max_fields():
                refuse_unknown(f"[{index}].{name}", name, TextPart.KNOWN)
        if not isinstance(part.get("text"), str):
            refuse(f"[{index}].text", "The 'text' of a text part must be a string.")
        texts.append(part["text"])
    return ("" if info.data.get("role") == "assistant" else "\n").join(texts)


class TextPart(Strict):
    """A part of a content that is a list; `_text` reads it."""

    type: Literal["text"]
    text: str


_GivenContent = str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None

Role = Literal["system", "developer", "user", "assistant", "tool"]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CalledFunction(Strict):
    """The function of a call. `arguments` is a JSON object as text, or nothing where the function has none. In
    earlier turns it is any text."""

    name: Name
    arguments: str


class ToolCall(Strict):
    """A call that the model made earlier. `index`, which streams have, says nothing here."""

    id: Name
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int, Field(ge=0, lt=MAX_CALLS)] | None = None


class Message(Strict):
    """`content` is text here, whichever way it came. All of a message goes to the chat template. `reasoning` and
    `reasoning_content` are two names of one thing."""

    role: Role
    content: Annotated[str | None, BeforeValidator(_text, json_schema_input_type=_GivenContent)] = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Annotated[
        Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None, BeforeValidator(or_neutral)
    ] = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    UNSUPPORTED = UNSUPPORTED_MESSAGE
    RULES = (described.WHAT_A_ROLE_SAYS, described.CALL_OF_A_TOOL)

    @model_validator(mode="after")
    def _belongs_to_the_role(self) -> Message:
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning", "reasoning_content"):
                if getattr(self, field) is not None:
                    refuse(field, f"A message of the role '{self.role}' can't have '{field}'.")
        if self.content is None and not self.tool_calls and self.any_reasoning is None:
            refuse("content", f"A message of the role '{self.role}' needs 'content'.")
        if (self.tool_call_id is None) == (self.role == "tool"):
            wanted = "needs" if self.role == "tool" else "can't have"
            refuse("tool_call_id", f"A message of the role '{self.role}' {wanted} 'tool_call_id'.")
        return self

    @property
    def any_reasoning(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: reasoning has both of its names."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in self.tool_calls]
        if self.any_reasoning is not None:
            message["reasoning"] = message["reasoning_content"] = self.any_reasoning
        return message


def _current_calls_fit(messages: list[Message]) -> list[Message]:
    """Check the arguments of calls that end the conversation."""
    past = past_length(messages, lambda message: isinstance(message, Message) and message.role == "assistant")
    for place, message in enumerate(messages[past:], past):
        for index, call in enumerate(message.tool_calls or ()):
            if not is_object(call.function.arguments):
                refuse(
                    f"[{place}].tool_calls[{index}].function.arguments",
                    "The 'arguments' of a call must be a JSON object, as text.",
                )
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(mended),
    AfterValidator(_current_calls_fit),
]
"""A conversation. Earlier turns are mended before they are checked."""
