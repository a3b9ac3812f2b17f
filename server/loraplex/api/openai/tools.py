"""The tools of a conversation, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from loraplex.api.openai.strict import (
    Strict,
    must,
    or_neutral,
    refuse,
    refuse_unsupported,
)
from loraplex.http.text import printable

MAX_TOOLS = 128
MODES = ("none", "auto", "required")


class Function(Strict):
    """`parameters` is a JSON schema; without it there are no arguments. `strict`: all calls fit it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class FunctionName(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(Strict):
    """This function is called, once."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(Strict):
    """Only these may be called; the prompt shows all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _known_choice(value: object) -> object:
    if isinstance(value, str) and value in MODES:
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise must('must be "none", "auto", "required", or an object with a \'type\'')
    if kind not in ("function", "allowed_tools"):
        refuse_unsupported("type", f"A tool choice of the type '{printable(kind)}' is not supported.")
    return value


def _kind_of_choice(value: object) -> str:
    if isinstance(value, dict):
        return f"<{value.get('type')}>"
    return "<function>" if isinstance(value, NamedTool) else "<text>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<function>")]
    | Annotated[AllowedToolChoice, Tag("<allowed_tools>")],
    Discriminator(_kind_of_choice),
    BeforeValidator(_known_choice),
]


@dataclass(frozen=True, slots=True)
class Choice:
    """The meaning of a tool choice. `names`: the functions that may be called; `called`: one at least is. `named`: it
    is the one function that the client names."""

    names: frozenset[str]
    called: bool = False
    named: bool = False


def choice_or_neutral(value: object) -> object:
    """Values that asked for nothing before there was a choice; "auto" is one now."""
    return value if value == "auto" else or_neutral(value)


def switch_or_neutral(value: object) -> object:
    """Validate a switch whose false value has a meaning of its own."""
    return value if value is False else or_neutral(value)


def chosen(tools: Sequence[Tool], choice: Any) -> Choice:
    """`choice` as it was checked. Without one: "auto" where there are tools."""
    names = frozenset(tool.function.name for tool in tools)
    if isinstance(choice, NamedTool):
        return Choice(frozenset({choice.function.name}), called=True, named=True)
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return Choice(frozenset(tool.function.name for tool in allowed.tools), allowed.mode == "required")
    return Choice(frozenset() if choice == "none" else names, choice == "required")


def check_tools(tools: Sequence[Tool], choice: Any) -> None:
    """Whether the choice can be met."""
    if choice == "none":
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            refuse(f"tools[{index}].function.name", f"Two tools are called '{printable(name)}'.")
        names.add(name)
    found = chosen(tools, choice)
    if found.called and not tools:
        refuse("tool_choice", "'tool_choice' needs a tool, and 'tools' has none.")
    if unknown := sorted(found.names - names):
        field = "function" if found.named else "allowed_tools.tools"
        refuse(f"tool_choice.{field}", f"'tools' has no function '{printable(unknown[0])}'.")
