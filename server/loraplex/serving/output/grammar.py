"""One llguidance grammar for answers with calls that always parse and fit their schemas.

The answer is what the model writes anyway: reasoning, text, and calls in the version's notation. Within a call every
byte is given but the arguments, and they follow their schema. `FormatParser` reads calls of the same notation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar.builders import json_schema_fragment, lark
from loraplex.serving.output.formats import Notation, ReasoningFormat, Shape, ToolFormat

MAX_CALLS = 16
"""In an answer that has to call, so that a model which would never stop does."""
MAX_BYTES = 256 << 10
"""Most bytes of the grammar, which has the schemas of all tools."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolRefused(GrammarRefused):
    """The parameters of the tool with this name cannot be followed."""

    def __init__(self, name: str, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.name = name


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """`parameters` None: it has none. `fits`: its arguments follow them, else they are any object."""

    name: str
    parameters: Mapping[str, Any] | None
    fits: bool


@dataclass
class ToolGrammar:
    """`written` is the tools' format and how it is written; None where there are no tools. `called`: the answer is one
    call at least, and nothing else; else text may stand around calls. `single`: one call at most. `answer`: the schema
    of answers without calls; needed where there are no tools. `token_id` finds control tokens by their text."""

    written: tuple[ToolFormat, Notation] | None
    tools: Sequence[OfferedTool]
    token_id: Callable[[str], int | None]
    called: bool = False
    single: bool = False
    answer: Mapping[str, Any] | None = None
    reasoning: ReasoningFormat | None = None
    in_reasoning: bool = False
    _rules: list[str] = field(default_factory=list)

    @property
    def notation(self) -> Notation:
        assert self.written is not None
        return self.written[1]

    def text(self) -> str:
        """The grammar. Raises ToolRefused, and GrammarRefused for the answer's schema."""
        self._rules = [_ANY]
        head = self._head()
        body = self._calls() if self.called else self._free()
        self._rules.insert(0, f"start: {head} body\nbody: {body}")
        return lark("\n".join(self._rules), max_bytes=MAX_BYTES)

    # Reasoning.

    def _head(self) -> str:
        reasoning = self.reasoning
        if reasoning is None:
            return ""
        self._rules.append(
            f"thoughts: {self._until('thoughts_end', reasoning.closes, ())} SPACE\nSPACE: /[ \\t\\r\\n]{{0,4}}/"
        )
        if self.in_reasoning:
            return "thoughts"
        self._rules.append(f"thinking: {self._marker(reasoning.opens)} thoughts")
        return "thinking?"

    # Text.

    def _until(self, name: str, marker: str, but: Iterable[str]) -> str:
        """Text up to the first marker, and the marker."""
        token = self.token_id(marker)
        if token is not None:
            return f"{self._text(name, (*but, marker))} <[{token}]>"
        self._rules.append(f"{name}[lazy]: {self._text(name, but)} {_quoted(marker)}")
        return name

    def _text(self, name: str, but: Iterable[str], not_first: str = "") -> str:
        """A terminal: text without these strings, and without such a beginning."""
        terminal = f"{name.upper()}_TEXT"
        without = "".join(f" & ~/(?s:.*){_pattern(string)}(?s:.*)/" for string in but)
        if not_first:
            without += f" & ~/[ \\t\\r\\n]*{not_first}(?s:.*)/"
        self._rules.append(f"{terminal}: ANY{without}")
        return terminal

    @property
    def _no_text(self) -> tuple[str, ...]:
        """The opening of the reasoning is none, or what follows would be read as reasoning."""
        return () if self.reasoning is None or self.in_reasoning else (self.reasoning.opens,)

    def _free(self) -> str:
        if not self.tools:
            return self._answer() or "ANY"
        notation = self.notation
        if not notation.opens:
            brackets = "[{\\[]" if Shape.LIST in notation.shapes else "\\{"
            return f"{self._calls()} | {self._answer() or self._text('plain', self._no_text, brackets)}"
        if (answer := self._answer()) is not None:
            return f"{self._calls()} | {answer}"
        before = self._until("before", notation.opens, self._no_text)
        self._rules.append(f"found: {before} {self._behind_marker()}")
        after = self._text("after", (*self._no_text, notation.opens))
        return f"found | {after}" if self.single else f"found* {after}"

    def _answer(self) -> str | None:
        return None if self.answer is None else json_schema_fragment(self.answer)

    # Calls.

    def _calls(self) -> str:
        """Calls and nothing else."""
        notation = self.notation
        block = f"{self._marker(notation.opens)} {self._behind_marker()}"
        self._rules.append(f"block: {block}")
        if self.single or self._is_list:
            return "block"
        joint = _quoted(notation.joint)
        return f"block ({joint} block){{0,{MAX_CALLS - 1}}}"

    @property
    def _is_list(self) -> bool:
        """All calls stand in one block."""
        return Shape.LIST in self.notation.shapes and Shape.NAMED not in self.notation.shapes

    def _behind_marker(self) -> str:
        """A block from behind its opening marker."""
        notation = self.notation
        self._rules.append(f"call: {' | '.join(self._call(index) for index in range(len(self.tools)))}")
        calls = "call"
        if self._is_list:
            more = "" if self.single else f' (", " call){{0,{MAX_CALLS - 1}}}'
            calls = f'"[" call{more} "]"'
            if Shape.OBJECT in notation.shapes:
                calls = f"(call | {calls})"
        padding = _quoted(notation.padding)
        end = f"{padding} {self._marker(notation.closes)}" if notation.closes else ""
        return f"{padding} {calls} {end}"

    def _call(self, index: int) -> str:
        assert self.written is not None
        tool, (tool_format, notation) = self.tools[index], self.written
        schema: Mapping[str, Any] = ANY_OBJECT
        if tool.fits:
            schema = NO_ARGUMENTS if tool.parameters is None else _object_schema(tool)
        try:
            arguments = json_schema_fragment(schema)
        except GrammarRefused as error:
            raise ToolRefused(tool.name, error.message, error.path) from error
        self._rules.append(f"arguments_{index}: {arguments}")
        if Shape.NAMED in notation.shapes:
            return f"{_quoted(tool.name)} {self._marker(notation.args_marker)} arguments_{index}"
        name = json.dumps(tool.name, ensure_ascii=False)
        head = f'{{"name": {name}, "{tool_format.argument_key}": '
        return f'{_quoted(head)} arguments_{index} "}}"'

    def _marker(self, marker: str) -> str:
        token = self.token_id(marker) if marker else None
        return _quoted(marker) if token is None else f"<[{token}]>"


@dataclass(frozen=True, slots=True)
class SchemaFault:
    """A schema that llguidance refuses: that of the arguments of `tool`, by its place in the grammar, or of answers."""

    tool: int | None
    reason: str


def schema_fault(text: str, message: str) -> SchemaFault | None:
    """The fault of a message that has its place as a line of the grammar `text`, and an excerpt. None without one."""
    told = _FAULT.match(message)
    if told is None:
        return None
    lines = json.loads(text)["grammars"][0]["lark_grammar"].splitlines() if text else []
    line = lines[int(told[1]) - 1] if 0 < int(told[1]) <= len(lines) else ""
    rule = _ARGUMENTS.match(line)
    return SchemaFault(int(rule[1]) if rule else None, told[2].strip())


_FAULT = re.compile(
    r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?:\n +\d+ \| .*)?\Z", re.DOTALL
)
_ARGUMENTS = re.compile(r"arguments_(\d+):")
_ANY = "ANY: /(?s:.*)/"


def _object_schema(tool: OfferedTool) -> Mapping[str, Any]:
    assert tool.parameters is not None
    kind = tool.parameters.get("type") or "object"
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ToolRefused(tool.name, "the parameters of a function are an object")
    return {**tool.parameters, "type": "object"}


def _quoted(text: str) -> str:
    """A string of Lark; nothing for none."""
    return json.dumps(text) if text else ""


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
