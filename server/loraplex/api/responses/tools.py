"""Tools and the choice among them.

One rule: a tool that is not a function runs at OpenAI, or in a way that this server does not know. Where the model may
do without, it is not offered to the model, and the answer's `tools` do not list it. Where the choice needs it, it is
refused by name. The same holds for a function whose loading is deferred: there is no search that would load it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field

from loraplex.api.openai.messages import Name
from loraplex.api.openai.strict import Strict, refuse, refuse_unsupported
from loraplex.api.openai.tools import MAX_TOOLS
from loraplex.api.openai.unions import by_type, kind, of_kinds, text_or_object
from loraplex.http.text import printable

OtherType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "custom",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "namespace",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
OTHER_TYPES: tuple[str, ...] = get_args(OtherType)


class FunctionTool(Strict):
    """`parameters` is a JSON schema."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    UNSUPPORTED = {"allowed_callers": (["direct"],), "async": (), "output_schema": ()}  # noqa: RUF012

    def repeated(self) -> dict[str, Any]:
        """The fields that answers repeat."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }

    def for_chat(self) -> dict[str, Any]:
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        function["strict"] = self.strict
        return {
            "type": "function",
            "function": {key: value for key, value in function.items() if value is not None},
        }


class OtherTool(BaseModel):
    """A tool that is no function. Its other fields are not looked at: it is not offered."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: OtherType


def _function_or_other() -> Discriminator:
    by_name = by_type().discriminator
    assert callable(by_name)
    return Discriminator(lambda value: "<function>" if by_name(value) == "<function>" else "<other>")


Tool = Annotated[
    Annotated[FunctionTool, kind("function")] | Annotated[OtherTool, kind("other")],
    _function_or_other(),
    BeforeValidator(of_kinds("tools", {"function", *OTHER_TYPES})),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class FunctionChoice(Strict):
    type: Literal["function"]
    name: Name


class AllowedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    type: Literal["function"] | OtherType
    name: Name | None = None


class AllowedTools(Strict):
    """The model may call only these; it is told of all."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools if tool.type == "function" and tool.name)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], kind("text")]
    | Annotated[FunctionChoice, kind("function")]
    | Annotated[AllowedTools, kind("allowed_tools")],
    text_or_object(),
    BeforeValidator(of_kinds("tool choices", {"function", "allowed_tools"}, or_text=True)),
]


@dataclass(frozen=True)
class Offer:
    """The functions that the model sees and may call. `places`: where each function stands in the request's `tools`."""

    functions: tuple[FunctionTool, ...]
    places: tuple[int, ...]
    choice: str | dict[str, Any]


def offer(tools: Sequence[FunctionTool | OtherTool] | None, choice: object) -> Offer:
    """Refuses a choice that cannot be met."""
    places = [
        place
        for place, tool in enumerate(tools or ())
        if isinstance(tool, FunctionTool) and not tool.defer_loading
    ]
    functions = {place: tool for place, tool in enumerate(tools or ()) if isinstance(tool, FunctionTool)}
    names = {functions[place].name for place in places}
    if isinstance(choice, AllowedTools) and (unknown := sorted(choice.names - names)):
        refuse("tool_choice.tools", f"'tools' has no function '{printable(unknown[0])}' that can be called.")
    if isinstance(choice, FunctionChoice) and choice.name not in names:
        refuse("tool_choice.name", f"'tools' has no function '{printable(choice.name)}' that can be called.")
    needed = choice.mode if isinstance(choice, AllowedTools) else choice
    callable_names = choice.names if isinstance(choice, AllowedTools) else names
    if needed == "required" and not callable_names:
        refuse_unsupported(
            "tool_choice", "'tool_choice' needs a tool, and 'tools' has no function that can be called."
        )
    return Offer(tuple(functions[place] for place in places), tuple(places), _chat_choice(choice))


def _chat_choice(choice: object) -> str | dict[str, Any]:
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedTools):
        if not choice.names:
            return "none"
        tools = [{"type": "function", "function": {"name": name}} for name in sorted(choice.names)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    assert isinstance(choice, str)
    return choice
