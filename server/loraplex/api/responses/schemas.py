"""Fields of a request to `/v1/responses`, and the chat request that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from loraplex.api.errors import in_client_terms
from loraplex.api.openai.parsing import parse_request
from loraplex.api.openai.sampling import TOKEN_ID_LIMIT, SamplingFields
from loraplex.api.openai.schemas import (
    ChatRequest,
    Effort,
    Hint,
    Metadata,
    MetadataText,
    StopStrings,
    TopLogprobs,
)
from loraplex.api.openai.strict import Strict
from loraplex.api.openai.unions import by_type, kind, of_kinds
from loraplex.api.responses.conversation import chat_messages
from loraplex.api.responses.items import Input
from loraplex.api.responses.tools import Offer, ToolChoice, Tools, offer

Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Six of them are of items that no answer of this server has."""
LOGPROBS: Includable = "message.output_text.logprobs"
SEALED_REASONING: Includable = "reasoning.encrypted_content"

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (),
    "context_management": (),
    "conversation": (),
    "image": ({"context_compression": "auto"},),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "store": (),
}
_FIELDS = (
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"max_(completion_)?tokens\Z"), "max_output_tokens"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"messages.*"), "input"),
)


_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")


MetadataValue = Annotated[str, Field(max_length=4096)]


class ReasoningConfig(Strict):
    """`summary`: no summaries are made. An answer holds the reasoning itself."""

    effort: Effort | None = None
    UNSUPPORTED = {"context": (), "generate_summary": (), "mode": ("standard",), "summary": ()}  # noqa: RUF012


class TextFormat(Strict):
    type: Literal["text"]

    def repeated(self) -> dict[str, Any]:
        return {"type": "text"}

    def for_chat(self) -> dict[str, Any] | None:
        return None


class JsonObjectFormat(Strict):
    type: Literal["json_object"]

    def repeated(self) -> dict[str, Any]:
        return {"type": "json_object"}

    def for_chat(self) -> dict[str, Any] | None:
        return {"type": "json_object"}


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None

    def repeated(self) -> dict[str, Any]:
        return {
            "type": "json_schema",
            "name": self.name,
            "schema": self.schema_,
            "description": self.description,
            "strict": bool(self.strict),
        }

    def for_chat(self) -> dict[str, Any] | None:
        schema = {
            name: value for name, value in self.repeated().items() if value is not None and name != "type"
        }
        return {"type": "json_schema", "json_schema": schema}


Format = Annotated[
    Annotated[TextFormat, kind("text")]
    | Annotated[JsonObjectFormat, kind("json_object")]
    | Annotated[JsonSchemaFormat, kind("json_schema")],
    by_type(),
    BeforeValidator(of_kinds("formats", {"text", "json_object", "json_schema"})),
]


class TextConfig(Strict):
    format: Format | None = None
    UNSUPPORTED = {"verbosity": ("medium",)}  # noqa: RUF012


class ResponsesStreamOptions(Strict):
    UNSUPPORTED = {"include_obfuscation": ()}  # noqa: RUF012


class ResponsesRequest(SamplingFields):
    """A null is the same as leaving a field out. Nothing is stored: a conversation comes whole in `input`."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Input
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    top_logprobs: TopLogprobs | None = None
    include: Annotated[list[Includable], Field(max_length=16)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=TOKEN_ID_LIMIT)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stop: StopStrings = ()
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Metadata | None = None
    # Hints that change no output.
    client_metadata: Annotated[dict[MetadataText, MetadataValue], Field(max_length=64)] | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    safety_identifier: Hint | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    UNSUPPORTED = UNSUPPORTED

    @model_validator(mode="after")
    def _can_choose(self) -> ResponsesRequest:
        self.offer()
        return self

    def offer(self) -> Offer:
        """The tools that the model is told of."""
        return offer(self.tools, self.tool_choice or "auto")

    def client_field(self, field: str) -> str:
        """The client's name for a field of the chat request."""
        if match := _TOOL.match(field):
            return f"tools[{self.offer().places[int(match[1])]}]{field[match.end() :]}"
        return client_field(field)

    def includes(self, what: Includable) -> bool:
        return what in (self.include or ())


def client_field(field: str) -> str:
    """The client's name for a field of the chat request, tools aside."""
    for pattern, name in _FIELDS:
        if match := pattern.match(field):
            return name + field[match.end() :]
    return field


class ResponsesChat(ChatRequest):
    """The chat request that `asked` becomes."""

    asked: ResponsesRequest

    def client_field(self, field: str) -> str:
        return self.asked.client_field(field)


def to_chat(asked: ResponsesRequest) -> ResponsesChat:
    """Raises ApiError (400)."""
    with in_client_terms(asked.client_field):
        return parse_request(ResponsesChat, chat_fields(asked) | {"asked": asked})


def chat_fields(asked: ResponsesRequest) -> dict[str, Any]:
    """Fields of the ChatRequest. Those that are not given stay out, so that errors are about what was sent."""
    offered = asked.offer()
    format_ = (
        asked.text.format.for_chat() if asked.text is not None and asked.text.format is not None else None
    )
    scored = asked.includes(LOGPROBS) or bool(asked.top_logprobs)
    fields: dict[str, Any] = {
        **asked.given_sampling(),
        "model": asked.model,
        "messages": chat_messages(asked.instructions, asked.input),
        "max_completion_tokens": asked.max_output_tokens,
        "logprobs": True if scored else None,
        "top_logprobs": asked.top_logprobs if scored else None,
        "tools": [tool.for_chat() for tool in offered.functions] or None,
        "tool_choice": offered.choice if offered.functions else None,
        "parallel_tool_calls": asked.parallel_tool_calls if offered.functions else None,
        "response_format": format_,
        "reasoning_effort": asked.reasoning.effort if asked.reasoning is not None else None,
        "stop": list(asked.stop) or None,
        "stream": asked.stream,
        "user": asked.user,
    }
    return {name: value for name, value in fields.items() if value is not None}
