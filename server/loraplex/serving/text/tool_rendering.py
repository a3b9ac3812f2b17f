"""How a conversation with tools goes through a chat template that may not know all of it.

A template is tried out once for each format. What it writes in the version's own format stays its task. What it does
not is written into the messages' contents before it sees them: calls, the list of tools, results.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from pydantic_core import from_json

from loraplex.serving.errors import TemplateError
from loraplex.serving.output.format_parser import FormatParser
from loraplex.serving.output.formats import (
    REASONING_FORMATS,
    RESULT_MARKERS,
    TOOL_FORMATS,
    Notation,
    ReasoningFormat,
    ToolFormat,
    ToolFormatName,
)
from loraplex.serving.output.parts import CallArguments, CallStart, merge_parts
from loraplex.serving.output.writing import write_calls, write_tools, written_notation
from loraplex.serving.text.chat_template import ChatTemplate

Message = dict[str, Any]
Calls = Literal["object", "text", "written"]
"""The template writes calls whose arguments it gets as an object, or as JSON text; or they are written for it."""

_NAME = "find_quokka"
_ARGUMENTS = {"place": 'the "old" zoo', "number": 3}
_ID = "q1a2b3c4d"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Finds a quokka.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["place", "number"],
        },
    },
}
_USER = {"role": "user", "content": "Where is it?"}
_WORDS = "quokka-found"
_MARKERS = [
    notation.opens for name in ("hermes", "mistral", "phi") for notation in TOOL_FORMATS[name].notations
]


@dataclass(frozen=True, slots=True)
class ToolRendering:
    """A template's own work for one format: list tools, show results, take a system message. `past_in_words`: the
    results of earlier turns are written for it, though it shows them."""

    calls: Calls
    lists_tools: bool
    shows_results: bool
    takes_system: bool
    past_in_words: bool = False


def past_end(messages: Sequence[Message]) -> int:
    """The place behind the earlier turns: behind the model's last words that something follows."""
    answers = (
        place for place in range(len(messages) - 1, 0, -1) if messages[place - 1]["role"] == "assistant"
    )
    return next(answers, 0)


def native_formats(template: ChatTemplate) -> dict[ToolFormatName, Calls]:
    """The formats in which the template writes calls."""
    found: dict[ToolFormatName, Calls] = {}
    for name, tool_format in TOOL_FORMATS.items():
        for calls in ("object", "text"):
            if name not in found and _writes(template, tool_format, calls):
                found[name] = calls
    return found


def detect_tool_format(template: ChatTemplate) -> ToolFormat | None:
    """The one format that the template writes. Of two that read alike, the one with the template's own key."""
    found = set(native_formats(template))
    if found == {"llama3", "json"}:
        # Both read any JSON. A marker that the template names, and does not write, makes it neither.
        if any(marker in template.literals for marker in _MARKERS):
            return None
        found.remove("json" if '"parameters"' in template.literals else "llama3")
    return TOOL_FORMATS[found.pop()] if len(found) == 1 else None


def detect_reasoning_format(template: ChatTemplate) -> ReasoningFormat | None:
    """The one whose markers the template has; of several or none, the one that it opens at the end of a prompt."""
    known = REASONING_FORMATS.values()
    found = [one for one in known if all(marker in template.literals for marker in one.markers)]
    if len(found) != 1:
        prompt = _rendered(template, [_USER], add_generation_prompt=True).rstrip()
        found = [one for one in known if prompt.endswith(one.opens)]
    return found[0] if len(found) == 1 else None


def tool_rendering(template: ChatTemplate, tool_format: ToolFormat) -> ToolRendering:
    native = native_formats(template)
    calls: Calls = native.get(tool_format.name, "written")
    # A list with the instructions of another format would mislead.
    writes_others = calls == "written" and any(
        _NAME in _rendered(template, probes(kind)[1]) for kind in ("object", "text")
    )
    lists = not writes_others and _NAME in _rendered(template, [_USER], PROBE_TOOLS)
    turn = {"role": "assistant", "content": _WORDS}
    result = {"role": "tool", "tool_call_id": _ID, "name": _NAME, "content": "a-quokka"}
    return ToolRendering(
        calls,
        lists,
        "a-quokka" in _rendered(template, [_USER, turn, result]),
        _WORDS in _rendered(template, [{"role": "system", "content": _WORDS}, _USER]),
    )


def _with_written_results(messages: Sequence[Message]) -> Iterator[Message]:
    """Results as the user's words. They and what the user says beside them are one message: many templates that show no
    results take no two messages of the user in a row."""
    begins, ends = RESULT_MARKERS
    for of_user, run in groupby(messages, lambda message: message["role"] in ("user", "tool")):
        group = list(run)
        if not of_user or all(message["role"] == "user" for message in group):
            yield from group
            continue
        contents = [
            f"{begins}\n{message.get('content', '')}\n{ends}"
            if message["role"] == "tool"
            else message["content"]
            for message in group
        ]
        yield {"role": "user", "content": "\n".join(contents)}


def with_tools(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_format: ToolFormat,
    rendering: ToolRendering,
    tokens: Collection[str],
) -> tuple[list[Message], Sequence[Mapping[str, Any]] | None]:
    """Messages and tools as the template gets them. `tokens` are the tokenizer's added ones."""
    notation = written_notation(tool_format, tokens)
    told: list[Message] = []
    names: dict[str, str] = {}
    written = past_end(messages) if rendering.past_in_words else 0
    written = written if rendering.shows_results else len(messages)
    for message in (*_with_written_results(messages[:written]), *messages[written:]):
        calls = message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if calls and (rendering.calls == "written" or (rendering.calls == "object" and _has_text(calls))):
            told.append(_with_written_calls(message, calls, tool_format, notation))
        elif message["role"] == "tool" and (name := names.get(message.get("tool_call_id", ""))) is not None:
            told.append({"name": name, **message})
        else:
            told.append(message)
    if not tools or rendering.lists_tools:
        return told, tools
    _add_to_system(told, write_tools(tool_format, notation, tools, tokens), rendering)
    return told, None


def _has_text(calls: Sequence[Mapping[str, Any]]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in calls)


def parsed_arguments(messages: Sequence[Message]) -> list[Message]:
    """Calls with arguments as objects. A turn with a call whose arguments are none keeps its calls as they are."""
    told = []
    for message in messages:
        calls = [_parsed(call) for call in message.get("tool_calls") or ()]
        told.append({**message, "tool_calls": calls} if calls and all(calls) else message)
    return told


def _parsed(call: Mapping[str, Any]) -> dict[str, Any] | None:
    function = call["function"]
    arguments: str = function["arguments"]
    try:
        # Deeper than 200 levels it is no value: templates and what marks control tokens call themselves for each.
        value = from_json(arguments.encode(), allow_inf_nan=False) if arguments.strip() else {}
    except ValueError:
        value = None
    return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else None


def _with_written_calls(
    message: Message, calls: Sequence[Mapping[str, Any]], tool_format: ToolFormat, notation: Notation
) -> Message:
    functions = [call["function"] for call in calls]
    written = write_calls(
        tool_format,
        notation,
        [(function["name"], function["arguments"].strip() or "{}") for function in functions],
    )
    content = message.get("content") or ""
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{content}\n{written}" if content else written}


def _add_to_system(told: list[Message], text: str, rendering: ToolRendering) -> None:
    role = "system" if rendering.takes_system else "user"
    place = next((index for index, message in enumerate(told) if message["role"] == role), None)
    if role == "system" and place != 0:
        told.insert(0, {"role": "system", "content": text})
    elif place is None:
        told.insert(0, {"role": "user", "content": text})
    else:
        content = told[place].get("content") or ""
        both = f"{content}\n\n{text}" if role == "system" else f"{text}\n\n{content}"
        told[place] = {**told[place], "content": both}


def _writes(template: ChatTemplate, tool_format: ToolFormat, calls: Calls) -> bool:
    plain, text = (_rendered(template, turns, PROBE_TOOLS) for turns in probes(calls))
    return reads_probe(tool_format, plain, text)


def probes(calls: Calls) -> tuple[list[Message], list[Message]]:
    """A conversation that ends with words, and the same with a call in their place."""
    arguments = _ARGUMENTS if calls == "object" else json.dumps(_ARGUMENTS)
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [_USER, {"role": "assistant", "content": _WORDS}], [_USER, turn]


PROBE_TOOLS: Sequence[Mapping[str, Any]] = (_TOOL,)


def reads_probe(tool_format: ToolFormat, plain: str, text: str) -> bool:
    """Whether the call of `probes` is where the words are in `plain`, and reads as it should."""
    before, found, after = plain.rpartition(_WORDS)
    if not found or _NAME not in text:
        return False
    same = (place for place, (a, b) in enumerate(zip(before, text, strict=False)) if a != b)
    turn = text[next(same, len(before)) :].removesuffix(after)
    parser = FormatParser(tool_format.notations, frozenset({_NAME}), lambda: _ID)
    parts = merge_parts([*parser.push(turn), *parser.finish()])
    if [type(part) for part in parts] != [CallStart, CallArguments]:
        return False
    arguments = parts[1]
    assert isinstance(arguments, CallArguments)
    return bool(json.loads(arguments.text) == _ARGUMENTS)


def _rendered(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """ "" where the template refuses."""
    normal = template.normalize_messages(messages)
    try:
        return template.render(normal, tools, add_generation_prompt=add_generation_prompt)
    except TemplateError:
        return ""
