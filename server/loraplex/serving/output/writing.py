"""Writes calls, and the list of tools, in a format: for prompts whose template does not."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from loraplex.serving.output.formats import Notation, Shape, ToolFormat

_LETTERS = string.ascii_letters + string.digits


def new_call_id(tool_format: ToolFormat) -> str:
    if tool_format.id_length is not None:
        return "".join(secrets.choice(_LETTERS) for _ in range(tool_format.id_length))
    return f"call_{secrets.token_hex(12)}"


def written_notation(tool_format: ToolFormat, tokens: Collection[str]) -> Notation:
    """How the model of a tokenizer with these added tokens writes the format."""
    return next(found for found in tool_format.written if not found.needs or found.needs in tokens)


def write_calls(
    tool_format: ToolFormat,
    notation: Notation,
    calls: Sequence[tuple[str, str]],
    quote: Callable[[str], str] = lambda name: json.dumps(name, ensure_ascii=False),
) -> str:
    """Names with their arguments as JSON, as the model writes them."""
    if not calls:
        return ""
    opens, closes = notation.opens + notation.padding, notation.closes
    closes = closes and (notation.padding + closes)
    key = tool_format.argument_key
    if Shape.NAMED in notation.shapes:
        blocks = [f"{opens}{name}{notation.args_marker}{arguments}" for name, arguments in calls]
        return notation.joint.join(blocks)
    objects = [f'{{"name": {quote(name)}, "{key}": {arguments}}}' for name, arguments in calls]
    if Shape.OBJECT in notation.shapes and (Shape.LIST not in notation.shapes or len(objects) == 1):
        return notation.joint.join(f"{opens}{call}{closes}" for call in objects)
    return f"{opens}[{', '.join(objects)}]{closes}"


def write_tools(
    tool_format: ToolFormat, notation: Notation, tools: Sequence[Mapping[str, Any]], tokens: Collection[str]
) -> str:
    """The system message's text about tools, if the template does not list them."""
    listed = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    markers = tool_format.tools_markers
    if markers is not None and set(markers).issubset(tokens):
        return f"{markers[0]}[{', '.join(listed)}]{markers[1]}"
    example = write_calls(tool_format, notation, [("NAME", '{"ARGUMENT": VALUE}')])
    lines = "\n".join(listed)
    return (
        "You can call tools. Each line describes one of them in JSON, with the JSON schema of its arguments:\n"
        f"{lines}\n"
        f"To call a tool, write:\n{example}\n"
        "Else answer in plain words."
    )
