"""The grammar of answers that may call tools, where calls must be made, must fit, or are limited to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loraplex.api.errors import ApiError, invalid
from loraplex.api.openai.schemas import ChatRequest
from loraplex.api.openai.structured_output.constraint import Constraint, constraint_of
from loraplex.api.openai.tools import Tool
from loraplex.http.text import printable
from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar.schema_rules import locate
from loraplex.serving.output.formats import OutputFormats
from loraplex.serving.output.grammar import ANY_OBJECT, OfferedTool, ToolGrammar, ToolRefused, schema_fault
from loraplex.serving.text.processor import TextProcessor

MAX_REASON = 400
MAX_PLACE = 200


@dataclass(frozen=True)
class ToolConstraint:
    """One grammar for all of it. `tools` are those whose schemas it has, by their places in the request; `places` are
    those of all tools, in the order of the grammar. `answer` is what answers without calls must follow."""

    text: str
    tools: Mapping[int, Tool]
    places: Sequence[int]
    answer: Constraint | None = None

    def refusal(self, error: GrammarRefused) -> ApiError:
        """The 400 for a grammar that was refused. It names the schema, and shows nothing of the grammar."""
        fault = schema_fault(self.text, error.message)
        reason = error.message if fault is None else fault.reason
        for place, tool in self.tools.items():
            if isinstance(error, ToolRefused):
                is_its = error.name == tool.function.name
            else:
                is_its = fault is not None and fault.tool is not None and self.places[fault.tool] == place
            where, why = locate(tool.function.parameters or {}, reason)
            if is_its or (fault is None and where):
                return _refused(f"tools[{place}].function.parameters", error.path or where, why)
        if self.answer is not None and (
            fault is not None or not self.tools or locate(self.answer.schema or {}, reason)[0]
        ):
            return self.answer.refusal(GrammarRefused(reason, error.path))
        return _refused("tools", "", reason)


def tool_constraint(
    request: ChatRequest, formats: OutputFormats, text: TextProcessor, *, in_reasoning: bool
) -> ToolConstraint | None:
    """None where calls are free, or there are none, and the answer's form is none of its business. Raises ApiError
    (400)."""
    choice, form = request.chosen_tools, request.form_field
    _check_form(request, in_reasoning=in_reasoning)
    places = {
        place: tool for place, tool in enumerate(request.tools or ()) if tool.function.name in choice.names
    }
    tools = places.values()
    strict = any(tool.function.strict for tool in tools)
    single = choice.named or request.parallel_tool_calls is False
    if not tools and not (form and in_reasoning):
        return None
    if tools and not (choice.called or strict or single or form):
        return None
    answer = None
    if form is not None and not choice.called:
        answer = constraint_of(request.response_format, None)
    grammar = ToolGrammar(
        None if formats.tools is None else (formats.tools, text.notation(formats.tools)),
        [
            OfferedTool(f.name, f.parameters, fits=choice.called or bool(f.strict))
            for f in (tool.function for tool in tools)
        ],
        text.control_id,
        called=choice.called,
        single=single,
        answer=None if answer is None else _schema(answer),
        # An answer of a form thinks only where the prompt makes it.
        reasoning=formats.reasoning if tools or in_reasoning else None,
        in_reasoning=in_reasoning,
    )
    followed = {place: tool for place, tool in places.items() if choice.called or tool.function.strict}
    constraint = ToolConstraint("", followed, tuple(places), answer)
    try:
        return replace(constraint, text=grammar.text())
    except GrammarRefused as error:
        raise constraint.refusal(error) from error


def _schema(answer: Constraint) -> Any:
    return ANY_OBJECT if answer.schema is None else answer.schema


def _check_form(request: ChatRequest, *, in_reasoning: bool) -> None:
    if request.structured_outputs is None:
        return
    field = "structured_outputs"
    if request.chosen_tools.names:
        message = f'\'{field}\' is only supported with "tool_choice": "none" where there are tools.'
        raise invalid(field, message, "unsupported_field")
    if in_reasoning:
        message = f"'{field}' is not supported here: this model's template begins each answer with reasoning."
        raise invalid(field, message, "unsupported_field")


def _refused(field: str, path: str, reason: str) -> ApiError:
    where = printable(f"{field}.{path}" if path and not path.startswith("[") else f"{field}{path}", MAX_PLACE)
    return invalid(
        where, f"'{where}' cannot be used: {printable(' '.join(reason.split()), MAX_REASON).rstrip('.')}."
    )
