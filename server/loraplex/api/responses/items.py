"""The items of a conversation in `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from loraplex.api.openai.history import is_object
from loraplex.api.openai.messages import MAX_MESSAGES, Name
from loraplex.api.openai.schemas import Hint
from loraplex.api.openai.strict import Strict, refuse, refuse_unsupported
from loraplex.api.openai.unions import by_type, kind, of_kinds, text_or
from loraplex.api.responses.history import mended
from loraplex.api.sealed import unseal

Status = Literal["in_progress", "completed", "incomplete"]
OF_OTHER_CALLERS: Mapping[str, tuple[object, ...]] = {
    "async": (),
    "caller": ({"type": "direct"},),
    "namespace": (),
}
_FOREIGN = "This 'encrypted_content' was not made by this server, which cannot read it; leave it out."


class CacheBreakpoint(Strict):
    mode: Literal["explicit"]
    ttl: Hint | None = None


class InputText(Strict):
    """`prompt_cache_breakpoint` is a hint: equal beginnings are always found."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class OutputText(Strict):
    """Text of an earlier answer. Its log probabilities are no part of the conversation."""

    type: Literal["output_text"]
    text: str
    logprobs: list[dict[str, Any]] | None = None
    UNSUPPORTED = {"annotations": ()}  # noqa: RUF012 - a class variable of Strict


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_TextPart = Annotated[
    Annotated[InputText, kind("input_text")]
    | Annotated[OutputText, kind("output_text")]
    | Annotated[Refusal, kind("refusal")],
    by_type(),
    BeforeValidator(of_kinds("content parts", {"input_text", "output_text", "refusal"})),
]
_Parts = Annotated[list[_TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)]
Content = Annotated[Annotated[str, kind("text")] | Annotated[_Parts, kind("list")], text_or("list")]


class MessageItem(Strict):
    """`id`, `status` and `phase` label an item, and change nothing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Hint | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict):
    """A call. `arguments` is a JSON object as text; in earlier turns it is any text."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: Hint | None = None
    status: Status | None = None
    UNSUPPORTED = OF_OTHER_CALLERS


class FunctionCallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: Hint | None = None
    name: Name | None = None
    status: Status | None = None
    UNSUPPORTED = OF_OTHER_CALLERS


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """The model's thinking of an earlier turn: `content`, or what `encrypted_content` holds, or `summary`."""

    type: Literal["reasoning"]
    id: Hint | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES)] | None = None
    encrypted_content: str | None = None
    status: Status | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> ReasoningItem:
        if self.encrypted_content and unseal(self.encrypted_content) is None:
            refuse_unsupported("encrypted_content", _FOREIGN)
        return self

    @property
    def text(self) -> str:
        if self.content:
            return "".join(part.text for part in self.content)
        if self.encrypted_content:
            return unseal(self.encrypted_content) or ""
        return "\n".join(part.text for part in self.summary)


class CompactionItem(Strict):
    """The result of `/v1/responses/compact`."""

    type: Literal["compaction"]
    encrypted_content: str
    id: Hint | None = None
    created_by: Hint | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> CompactionItem:
        if unseal(self.encrypted_content) is None:
            refuse_unsupported("encrypted_content", _FOREIGN)
        return self

    @property
    def summary(self) -> str:
        return unseal(self.encrypted_content) or ""


Item = Annotated[
    Annotated[MessageItem, kind("message")]
    | Annotated[FunctionCallItem, kind("function_call")]
    | Annotated[FunctionCallOutputItem, kind("function_call_output")]
    | Annotated[ReasoningItem, kind("reasoning")]
    | Annotated[CompactionItem, kind("compaction")],
    by_type("message"),
    BeforeValidator(
        of_kinds(
            "items",
            {"message", "function_call", "function_call_output", "reasoning", "compaction"},
            "message",
        )
    ),
]


def _current_calls_fit(items: list[Item]) -> list[Item]:
    """Check the arguments of calls that end the conversation."""
    for place in range(len(items) - 1, -1, -1):
        item = items[place]
        if not isinstance(item, FunctionCallItem):
            break
        if not is_object(item.arguments):
            refuse(f"[{place}].arguments", "The 'arguments' of a call must be a JSON object, as text.")
    return items


Items = Annotated[
    list[Item],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    BeforeValidator(mended),
    AfterValidator(_current_calls_fit),
]
Input = Annotated[Annotated[str, kind("text")] | Annotated[Items, kind("list")], text_or("list")]


def text_of(content: str | list[InputText | OutputText | Refusal], *, between: str) -> str:
    """Parts as one text, with `between` between them."""
    return content if isinstance(content, str) else between.join(part.text for part in content)
