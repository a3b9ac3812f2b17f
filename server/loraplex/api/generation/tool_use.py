"""Rules that a chat's tools set for its answer, in the formats of the version that answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loraplex.api.errors import invalid
from loraplex.api.generation.tool_constraint import ToolConstraint, tool_constraint
from loraplex.api.openai.schemas import ChatRequest
from loraplex.http.text import printable
from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import OutputFormats, Shape
from loraplex.serving.output.json_readers import WHITE
from loraplex.serving.output.parser import OutputParser, PlainParser
from loraplex.serving.output.writing import new_call_id
from loraplex.serving.text.processor import TextProcessor


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of each choice is read. `shown`: special tokens that have a text in it. `calls_end`: a choice with
    calls ends for the reason "tool_calls". `reasons`: there may be reasoning. `constraint`, not checked yet: what the
    grammar of the answers says."""

    parser: Callable[[], OutputParser] = PlainParser
    shown: frozenset[str] = frozenset()
    calls_end: bool = True
    reasons: bool = False
    constraint: ToolConstraint | None = None


PLAIN = Reading()


def check_format(request: ChatRequest, formats: OutputFormats, text: TextProcessor) -> None:
    """Raises ApiError (400) where tools may be called, and the model has no format for calls, or none in which a name
    can be read back."""
    names = request.chosen_tools.names
    if not names:
        return
    if formats.tools is None:
        raise invalid(
            "tools",
            f'\'{printable(request.model)}\' has no format for calls of tools. Ask with "tool_choice": "none", or '
            "push the adapter with the format that it writes: loraplex adapter push NAME DIR --tool-format json (or "
            "hermes, llama3, mistral, phi). The base model's is the operator's --tool-format.",
            "unsupported_field",
        )
    if Shape.NAMED not in text.notation(formats.tools).shapes:
        return
    for place, tool in enumerate(request.tools or ()):
        name = tool.function.name
        if name in names and ("[" in name or name[0] in WHITE):
            field = f"tools[{place}].function.name"
            raise invalid(
                field,
                f"'{field}' cannot be used: calls of '{printable(request.model)}' have the name as it is, without "
                "quotes, so it can have no '[' and no space at its beginning.",
            )


def check_effort(request: ChatRequest) -> None:
    """Check the effort for a model whose chat template knows none. Raises ApiError (400) if it is more than a hint."""
    field, effort = request.asked_effort
    if effort != "none" and not request.EFFORT_IS_A_HINT:
        raise invalid(
            field,
            f"The chat template of '{printable(request.model)}' knows no '{field}'; leave it out.",
            "unsupported_field",
        )


def read_chat(
    request: ChatRequest, formats: OutputFormats, text: TextProcessor, *, in_reasoning: bool
) -> Reading:
    """`in_reasoning`: the prompt has opened it. Raises ApiError (400) for what no grammar can keep an answer to."""
    choice = request.chosen_tools
    tools, reasoning = formats.tools, formats.reasoning
    constraint = tool_constraint(request, formats, text, in_reasoning=in_reasoning)
    if not choice.names:
        tools = None
    if tools is None and reasoning is None:
        return PLAIN
    notations = () if tools is None else tools.notations
    if tools is not None and constraint is not None:
        notations = tools.under_grammar(text.notation(tools))

    def parser() -> FormatParser:
        return FormatParser(
            notations,
            choice.names,
            lambda: "" if tools is None else new_call_id(tools),
            reasoning,
            in_reasoning,
            streams=constraint is not None,
            calls_only=choice.called,
        )

    shown = frozenset[str]()
    for found in (tools, reasoning):
        shown |= found.markers if found is not None else shown
    return Reading(parser, shown, not choice.named, reasoning is not None, constraint)
