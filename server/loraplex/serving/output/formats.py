"""How models write calls of tools and reasoning, as data. The lists are closed: a version names one of each.

A call's arguments stand under "arguments" or "parameters", whatever the format; its first one is what the format
writes. White space next to a marker belongs to the marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Literal

ToolFormatName = Literal["hermes", "llama3", "mistral", "phi", "json", "none"]
ReasoningFormatName = Literal["think_tags", "think_brackets", "none"]

ARGUMENT_KEYS = ("arguments", "parameters")
NESTED_KEY = "function"
"""An object with a call's fields, as in OpenAI's own form."""
OTHER_KEYS = ("id", "type", "index")
"""Strings and numbers that some models write into a call; they say nothing that an answer needs."""


class Shape(Enum):
    """The content between the markers of a block. Calls are JSON objects: name and arguments."""

    OBJECT = "one object"
    LIST = "a list of objects"
    NAMED = "the name, `args_marker`, and the arguments"


@dataclass(frozen=True, slots=True)
class Notation:
    """A block of calls begins with `opens` and ends with `closes` or the end of the text. Without `opens` it begins
    with its JSON, at the head of the answer only. `follows`: only behind another call. `whole`: nothing follows.

    `padding` is written inside both markers, `joint` between blocks. `needs` is a token without which a tokenizer's
    model does not write this."""

    shapes: tuple[Shape, ...]
    opens: str = ""
    closes: str = ""
    follows: bool = False
    whole: bool = False
    args_marker: str = ""
    id_marker: str = ""
    padding: str = ""
    joint: str = ""
    needs: str = ""

    @property
    def markers(self) -> Iterator[str]:
        return filter(None, (self.opens, self.closes, self.args_marker, self.id_marker))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Read is what any of `notations` says; written, the first of `written` that the tokenizer's model writes.
    `id_length`: ids are as many letters and digits, where templates insist on it. `tools_markers`: the model was
    trained on tools between these, where its tokenizer has them."""

    name: ToolFormatName
    notations: tuple[Notation, ...]
    written: tuple[Notation, ...]
    argument_key: str = "arguments"
    id_length: int | None = None
    tools_markers: tuple[str, str] | None = None

    def under_grammar(self, notation: Notation) -> tuple[Notation, ...]:
        """The notations that are read in answers that a grammar keeps to one written notation."""
        return (notation, *(other for other in self.notations if other.follows))

    @property
    def markers(self) -> frozenset[str]:
        """Which a stream of text has to show even where they are control tokens."""
        return frozenset(marker for notation in self.notations for marker in notation.markers)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning stands at the head of an answer, between these."""

    name: ReasoningFormatName
    opens: str
    closes: str

    @property
    def markers(self) -> frozenset[str]:
        return frozenset((self.opens, self.closes))


_HERMES = Notation((Shape.OBJECT,), "<tool_call>", "</tool_call>", padding="\n", joint="\n")
_LLAMA = Notation((Shape.OBJECT,), joint="; ")
_MISTRAL = Notation(
    (Shape.NAMED, Shape.LIST), "[TOOL_CALLS]", args_marker="[ARGS]", id_marker="[CALL_ID]", needs="[ARGS]"
)
_MISTRAL_LIST = Notation((Shape.LIST,), "[TOOL_CALLS]", padding=" ")
_PHI = Notation((Shape.LIST,), "<|tool_call|>", "<|/tool_call|>")
_JSON = Notation((Shape.OBJECT, Shape.LIST), whole=True)

TOOL_FORMATS: Mapping[ToolFormatName, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("hermes", (_HERMES,), (_HERMES,)),
        "llama3": ToolFormat(
            "llama3",
            (
                _LLAMA,
                Notation((Shape.OBJECT,), "<|python_tag|>"),
                Notation((Shape.OBJECT,), ";", follows=True),
            ),
            (_LLAMA,),
            argument_key="parameters",
        ),
        "mistral": ToolFormat("mistral", (_MISTRAL,), (_MISTRAL, _MISTRAL_LIST), id_length=9),
        "phi": ToolFormat(
            "phi",
            (_PHI, Notation((Shape.LIST,), "functools")),
            (_PHI,),
            tools_markers=("<|tool|>", "<|/tool|>"),
        ),
        "json": ToolFormat("json", (_JSON,), (_JSON,)),
    }
)
"""All but "none", which calls nothing."""

REASONING_FORMATS: Mapping[ReasoningFormatName, ReasoningFormat] = MappingProxyType(
    {
        "think_tags": ReasoningFormat("think_tags", "<think>", "</think>"),
        "think_brackets": ReasoningFormat("think_brackets", "[THINK]", "[/THINK]"),
    }
)
"""All but "none"."""

RESULT_MARKERS = ("<tool_response>", "</tool_response>")
"""Around the results of tools, where the chat template leaves them out."""
ALL_MARKERS: frozenset[str] = frozenset(RESULT_MARKERS).union(
    *(found.markers for found in TOOL_FORMATS.values()),
    *(found.markers for found in REASONING_FORMATS.values()),
    *(found.tools_markers or () for found in TOOL_FORMATS.values()),
)
"""Markers of all formats: a version may have any of them."""


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of a base model or a version. None: it has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    def of_version(self, tool_format: str | None, reasoning_format: str | None) -> OutputFormats:
        """A version's by their names, where it says any; else these, the base model's."""
        tools, reasoning = self.tools, self.reasoning
        if tool_format is not None:
            tools = next((found for found in TOOL_FORMATS.values() if found.name == tool_format), None)
        if reasoning_format is not None:
            known = REASONING_FORMATS.values()
            reasoning = next((found for found in known if found.name == reasoning_format), None)
        return OutputFormats(tools, reasoning)


NO_FORMATS = OutputFormats()
