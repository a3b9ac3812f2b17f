"""Grammars as llguidance takes them, from what clients send. Pure functions: nothing is built here.

Each returns the text of one grammar, which `GrammarChecker.check` must accept before it goes to an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar.schema_rules import checked_text

MAX_GRAMMAR_BYTES = 64 << 10
"""Most bytes of a Lark or GBNF text, and of all choices together."""
MAX_REGEX_BYTES = 8 << 10
MAX_CHOICES = 4096

WHITE_SPACE = r"\r?\n[ \t]{0,32}|[ ]{1,2}"
"""Between two tokens of JSON: a line break with its indentation, one or two spaces, or nothing. It is matched at most
once at each place, so that an answer cannot end in white space that goes on and on."""
ESCAPES = 'nrbtf\\"'
"""Behind a backslash in a string. With \\u, which is left out, a key could be written in two ways: an additional
property could be one that the schema names, and one pattern's key another's."""


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def json_schema(schema: Any, *, compact: bool = False) -> str:
    """JSON that fits `schema`, an object or a boolean of JSON Schema (drafts 4 to 2020-12). `compact`: without any
    white space. Raises GrammarRefused."""
    return f'{{"grammars":[{{"json_schema":{_with_white_space(schema, compact)}}}]}}'


def json_schema_fragment(schema: Any, *, compact: bool = False) -> str:
    """The same to stand in a rule of a Lark grammar, as `%json {…}`. Raises GrammarRefused."""
    # In ASCII: Lark's own lexer reads it first.
    return "%json " + _BEYOND_ASCII.sub(_escaped, _with_white_space(schema, compact))


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def json_object(*, compact: bool = False) -> str:
    """Any JSON object."""
    return json_schema({"type": "object"}, compact=compact)


def regex(pattern: str) -> str:
    """Text that the whole of `pattern` matches, in the syntax of Rust's `regex` crate. Raises GrammarRefused."""
    if not pattern:
        raise GrammarRefused("an empty pattern matches no text")
    _check_bytes(pattern, "the pattern", MAX_REGEX_BYTES)
    return lark(f"start: /{_in_slashes(pattern)}/")


def choice(choices: Sequence[str]) -> str:
    """One of `choices`. Raises GrammarRefused."""
    if not choices:
        raise GrammarRefused("there must be at least one choice")
    if len(choices) > MAX_CHOICES:
        raise GrammarRefused(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed")
    if not any(choices):
        raise GrammarRefused("there must be a choice that is not empty")
    return lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def lark(text: str, *, max_bytes: int = MAX_GRAMMAR_BYTES) -> str:
    """A grammar in llguidance's dialect of Lark. Raises GrammarRefused."""
    _check_bytes(text, "the grammar", max_bytes)
    return _grammar(lark_grammar=text)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in the EBNF of llama.cpp and XGrammar, which `GrammarChecker.lark_of_gbnf` converts."""
    return any(line.split("::=", 1)[0].strip().replace("-", "_").isidentifier() for line in _rules(text))


def gbnf(text: str) -> str:
    """The text itself, if it can be converted. Raises GrammarRefused."""
    _check_bytes(text, "the grammar", MAX_GRAMMAR_BYTES)
    if "\\u" in text or "\\U" in text:
        raise GrammarRefused("'\\u' is not supported in this syntax; write the character itself, or use Lark")
    return text


def _rules(text: str) -> list[str]:
    return [line for line in text.splitlines() if "::=" in line]


def _with_white_space(schema: Any, compact: bool) -> str:
    text = checked_text(schema)
    options: dict[str, object] = {"whitespace_flexible": not compact, "json_allowed_escapes": ESCAPES}
    if not compact:
        options["whitespace_pattern"] = WHITE_SPACE
    # Large schemas are written once.
    return f'{{"x-guidance":{_dumps(options)}{"," if len(text) > 2 else ""}{text[1:]}'


def _grammar(**source: Any) -> str:
    return _dumps({"grammars": [source]})


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _check_bytes(text: str, what: str, most: int) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > most:
        raise GrammarRefused(f"{what} has {size} bytes; at most {most} are allowed")


def _in_slashes(pattern: str) -> str:
    """The pattern as it stands between slashes in Lark: slashes and line breaks escaped."""
    written: list[str] = []
    escaped = False
    for char in pattern:
        if escaped:
            written.append(_LARK_ESCAPES.get(char, "\\" + char))
        elif char != "\\":
            written.append(_LARK_ESCAPES.get(char, char))
        escaped = char == "\\" and not escaped
    if escaped:
        raise GrammarRefused("the pattern ends in a backslash")
    return "".join(written)


_LARK_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
