"""Tools and the choice among them. A tool that Anthropic runs, or whose schema it keeps, is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from loraplex.api.anthropic.blocks import CacheControl
from loraplex.api.openai.messages import Name
from loraplex.api.openai.strict import Strict, refuse, refuse_unsupported
from loraplex.api.openai.tools import MAX_TOOLS
from loraplex.api.openai.unions import by_type, kind, of_kinds
from loraplex.http.text import printable


class MessagesTool(Strict):
    """`defer_loading`: the model is told of it once a result of another tool has named it (`tool_reference`).
    `eager_input_streaming` is a hint: arguments are streamed as they come."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    UNSUPPORTED = {"allowed_callers": (["direct"],), "input_examples": ()}  # noqa: RUF012

    def for_chat(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


def _custom(value: Any) -> Any:
    named = value.get("type") if isinstance(value, dict) else None
    if named is not None and named != "custom":
        shown = printable(str(named))
        refuse_unsupported("type", f"Tools of the type '{shown}' are not supported; those with a schema are.")
    return value


Tools = Annotated[list[Annotated[MessagesTool, BeforeValidator(_custom)]], Field(max_length=MAX_TOOLS)]


class AutoChoice(Strict):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyChoice(Strict):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict):
    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoneChoice(Strict):
    type: Literal["none"]

    @property
    def disable_parallel_tool_use(self) -> None:
        return None


ToolChoice = Annotated[
    Annotated[AutoChoice, kind("auto")]
    | Annotated[AnyChoice, kind("any")]
    | Annotated[NamedChoice, kind("tool")]
    | Annotated[NoneChoice, kind("none")],
    by_type(),
    BeforeValidator(of_kinds("tool choices", {"auto", "any", "tool", "none"})),
]


@dataclass(frozen=True)
class Offer:
    """The tools that the model sees and may call. `places`: where each tool stands in the request's `tools`."""

    tools: tuple[MessagesTool, ...]
    places: tuple[int, ...]
    choice: str | dict[str, Any]


def offer(
    tools: Sequence[MessagesTool] | None,
    choice: AutoChoice | AnyChoice | NamedChoice | NoneChoice | None,
    loaded: Collection[str],
) -> Offer:
    """`loaded` are names of deferred tools that the conversation has loaded. Refuses a choice that cannot be met."""
    found = {
        place: tool for place, tool in enumerate(tools or ()) if not tool.defer_loading or tool.name in loaded
    }
    chat_choice: str | dict[str, Any] = "auto"
    if isinstance(choice, AnyChoice):
        chat_choice = "required"
        if not found:
            refuse("tool_choice", "'tool_choice' needs a tool, and 'tools' has none that can be called.")
    elif isinstance(choice, NamedChoice):
        chat_choice = {"type": "function", "function": {"name": choice.name}}
        if choice.name not in {tool.name for tool in found.values()}:
            refuse("tool_choice.name", f"'tools' has no tool '{printable(choice.name)}' that can be called.")
    elif isinstance(choice, NoneChoice):
        chat_choice = "none"
    return Offer(tuple(found.values()), tuple(found), chat_choice)
