"""Fields of requests to `/v1/messages`, and the chat request that one becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from loraplex.api.anthropic.blocks import CacheControl, Messages, SystemText, ToolResultBlock, UserMessage
from loraplex.api.anthropic.conversation import chat_messages
from loraplex.api.anthropic.tools import Offer, ToolChoice, Tools, offer
from loraplex.api.errors import in_client_terms
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.sampling import TOKEN_ID_LIMIT, SamplingFields
from loraplex.api.openai.schemas import MAX_STOP_LENGTH, MAX_STOP_STRINGS, ChatRequest
from loraplex.api.openai.strict import Strict, refuse
from loraplex.api.openai.unions import by_type, kind, of_kinds

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "container": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": (),
    "output_format": (),
    "speed": ("standard",),
}
_FIELDS = (
    (re.compile(r"response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"max_completion_tokens\Z"), "max_tokens"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"parallel_tool_calls"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"messages.*"), "messages"),
    (re.compile(r"stop\b"), "stop_sequences"),
    (re.compile(r"user\Z"), "metadata.user_id"),
)
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(\.parameters)?")
Display = Literal["summarized", "omitted"]


class ThinkingEnabled(Strict):
    """`budget_tokens` is a target that is not enforced: `max_tokens` bounds thinking and answer together."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)]
    display: Display | None = None


class ThinkingAdaptive(Strict):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingDisabled(Strict):
    type: Literal["disabled"]

    @property
    def display(self) -> None:
        return None


Thinking = Annotated[
    Annotated[ThinkingEnabled, kind("enabled")]
    | Annotated[ThinkingAdaptive, kind("adaptive")]
    | Annotated[ThinkingDisabled, kind("disabled")],
    by_type(),
    BeforeValidator(of_kinds("kinds of thinking", {"enabled", "adaptive", "disabled"})),
]


class JsonFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ClearThinking(Strict):
    """With "all" nothing is cleared."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


_Edit = Annotated[ClearThinking, BeforeValidator(of_kinds("edits", {"clear_thinking_20251015"}))]


class ContextManagement(Strict):
    edits: Annotated[list[_Edit], Field(max_length=8)] | None = None


class CallerMetadata(Strict):
    """`user_id` keeps a caller on one version where a release is sticky by user."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountRequest(Strict):
    """The fields that the prompt is made of. A null is the same as leaving a field out."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Messages
    system: SystemText | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    UNSUPPORTED = UNSUPPORTED

    @model_validator(mode="after")
    def _can_choose(self) -> CountRequest:
        self.offer()
        return self

    def offer(self) -> Offer:
        """The tools that the model is told of."""
        loaded: set[str] = set()
        for message in self.messages:
            if isinstance(message, UserMessage) and not isinstance(message.content, str):
                for block in message.content:
                    if isinstance(block, ToolResultBlock):
                        loaded |= block.references
        return offer(self.tools, self.tool_choice, loaded)

    def client_field(self, field: str) -> str:
        """The client's name for a field of the chat request."""
        if match := _TOOL.match(field):
            place = self.offer().places[int(match[1])]
            return f"tools[{place}]{'.input_schema' if match[2] else ''}{field[match.end() :]}"
        for pattern, name in _FIELDS:
            if match := pattern.match(field):
                return name + field[match.end() :]
        return field

    def for_chat(self) -> dict[str, Any]:
        offered, config = self.offer(), self.output_config or OutputConfig()
        format_ = None
        if config.format is not None:
            schema = {"name": "answer", "schema": config.format.schema_, "strict": True}
            format_ = {"type": "json_schema", "json_schema": schema}
        parallel = self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use
        return {
            "model": self.model,
            "messages": chat_messages(self.system, self.messages),
            "tools": [tool.for_chat() for tool in offered.tools] or None,
            "tool_choice": offered.choice if offered.tools else None,
            "parallel_tool_calls": parallel if offered.tools else None,
            "response_format": format_,
            "reasoning_effort": "none" if isinstance(self.thinking, ThinkingDisabled) else config.effort,
        }


_StopSequence = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class MessagesRequest(CountRequest, SamplingFields):
    """`max_tokens` may be more than the context has room for: the answer ends with the context then."""

    max_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)]
    metadata: CallerMetadata | None = None
    stop_sequences: Annotated[list[_StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None  # a hint that changes no output

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> MessagesRequest:
        if self.messages[-1].role == "assistant":
            refuse("messages", "The last message is the assistant's; to continue an answer is not supported.")
        return self

    def for_chat(self) -> dict[str, Any]:
        return {
            **self.given_sampling(),
            **super().for_chat(),
            "max_tokens": self.max_tokens,
            "stop": list(dict.fromkeys(self.stop_sequences or ())) or None,
            "stream": self.stream,
            "user": self.metadata.user_id if self.metadata is not None else None,
        }


class MessagesChat(ChatRequest):
    """The chat request that `asked` becomes."""

    ENDS_WITH_CONTEXT: ClassVar[bool] = True
    EFFORT_IS_A_HINT: ClassVar[bool] = True
    asked: CountRequest

    def client_field(self, field: str) -> str:
        return self.asked.client_field(field)


def to_chat(asked: CountRequest) -> MessagesChat:
    """Raises ApiError (400)."""
    fields = {name: value for name, value in asked.for_chat().items() if value is not None}
    with in_client_terms(asked.client_field):
        return parse_request(MessagesChat, fields | {"asked": asked})
