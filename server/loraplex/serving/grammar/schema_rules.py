"""Checks of a JSON schema before llguidance sees it, and the place in it of the reason of a refusal.

llguidance judges the keywords: it refuses what it cannot enforce. Here are the limits that it does not have, the
rules that it accepts and does not enforce, and the way from its message to a place in the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Literal

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar.neutral_words import LEFT_OUT, NeutralWords, Path, referenced
from loraplex.serving.grammar.patterns import enforced, is_written

MAX_SCHEMA_BYTES = 64 << 10
MAX_SCHEMA_DEPTH = 64
"""Levels of objects and arrays of the schema itself."""
MAX_INTEGER = 1 << 53
"""Largest number that a schema compares with: a 64-bit float has each integer up to it."""
MAX_EXPONENT = 22
"""Largest exponent of ten, for the same numbers. llguidance's reader multiplies or divides by a power of ten. That
rounds once: 10^22 is the last power that a float has."""

_HOLDS: Mapping[str, Literal["one", "named", "one or listed"]] = {
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames", "contains"), "one"),
    **dict.fromkeys(("not", "if", "then", "else"), "one"),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"), "named"),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "items"), "one or listed"),
}
"""How a keyword's value holds other schemas."""
_NUMBERS = ("enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WITHOUT_NUMBERS = frozenset((str, bool, type(None)))
_SAY_THE_TYPE = frozenset(("anyOf", "oneOf", "allOf", "$ref", "enum", "const"))
"""Words beside which a null `type` is one that a library left out. By itself it is YAML's reading of `type: null`."""
_CHECKED = frozenset((*_NUMBERS, "minProperties", "$ref"))

_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
_Found = Callable[[Mapping[str, Any], re.Match[str]], bool]
_FAULTS: tuple[tuple[re.Pattern[str], str, _Found, str], ...] = (
    (
        re.compile(r"Unknown format: (.*)"),
        "format",
        lambda node, told: node.get("format") == told[1],
        "the format '{1}' is not supported",
    ),
    (
        re.compile(r"Pointer '(.*)' does not exist"),
        "$ref",
        lambda node, told: node.get("$ref") == f"#{told[1]}",
        "nothing stands at '{1}' of this schema",
    ),
    (
        re.compile(r"Invalid type: (.*)"),
        "type",
        lambda node, told: told[1] in _each(node.get("type")),
        "'{1}' is no type of JSON Schema: string, number, integer, boolean, object, array and null are",
    ),
    (
        re.compile(r"Resource '(?:json-schema:///)?(.*)' is not present"),
        "$ref",
        lambda node, told: node.get("$ref") == told[1],
        "it must point into this schema (#/…): others are not fetched",
    ),
    (
        re.compile(r"Resource '(?:json-schema:///)?(.*)' is not present"),
        "$schema",
        lambda node, told: node.get("$schema") == told[1],
        "no draft of JSON Schema has this address",
    ),
    (
        re.compile(r"Expected (.*) for '(.*)', got (.*)"),
        "{2}",
        lambda node, told: told[2] in node and _compact(node[told[2]]) == told[3],
        "expected {1}",
    ),
    (
        re.compile(r"^(\w+) must be an? (?:object|array)"),
        "{1}",
        lambda node, told: told[1] in node and not isinstance(node[told[1]], dict | list),
        "{0}",
    ),
    (
        re.compile(r"required property '(.*)' is unsatisfiable"),
        "properties.{1}",
        lambda node, told: (
            _holds(node, "properties", dict, told[1]) and _holds(node, "required", list, told[1])
        ),
        "it is required, and no value fits it",
    ),
)
"""Reasons of llguidance, the keyword that is at fault, whether it is at fault in a node, and the reason in words."""

_OF_SHAPE = re.compile(r"must be an? |^Expected |invalid multiple of")
_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (word for word, holds in _HOLDS.items() if holds == "one"),
        (lambda value: isinstance(value, dict | bool), "a schema: an object, true or false"),
    ),
    **dict.fromkeys(
        (word for word, holds in _HOLDS.items() if holds == "named"),
        (lambda value: isinstance(value, dict) and _are_schemas(value.values()), "an object of schemas"),
    ),
    **dict.fromkeys(
        ("anyOf", "oneOf", "allOf", "prefixItems"),
        (lambda value: isinstance(value, list) and _are_schemas(value), "an array of schemas"),
    ),
    "items": (lambda value: _are_schemas(_each(value)), "a schema, or an array of them"),
    "required": (lambda value: isinstance(value, list) and _are_texts(value), "an array of strings"),
    "type": (lambda value: _are_texts(_each(value)), "a string, or an array of them"),
    "enum": (lambda value: isinstance(value, list), "an array"),
    "multipleOf": (lambda value: isinstance(value, int | float) and value > 0, "a number above 0"),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (lambda value: isinstance(value, int) and 0 <= value <= MAX_INTEGER, "a whole number of usual size"),
    ),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a string")),
}
"""The values that keywords must have, for reasons that do not say where they arose."""


def checked_text(schema: Any) -> str:
    """A schema as compact JSON, with its patterns as llguidance enforces them; {} for True. Raises GrammarRefused for
    one that is too large or too deep, or that holds what would be accepted and not enforced."""
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        reason = "no text fits the schema 'false'" if schema is False else "a schema must be an object"
        raise GrammarRefused(reason)
    try:
        text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise GrammarRefused("the schema has a number that is larger than any 64-bit float") from None
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_SCHEMA_BYTES:
        raise GrammarRefused(f"the schema has {size} bytes; at most {MAX_SCHEMA_BYTES} are allowed")
    if text.count("{") + text.count("[") > MAX_SCHEMA_DEPTH:
        _check_depth(schema)
    if "x-guidance" in schema:
        raise GrammarRefused("the keyword 'x-guidance' is not supported", "x-guidance")
    if "draft-03" in str(schema.get("$schema")):
        raise GrammarRefused("JSON Schema is supported from draft 4 on", "$schema")
    schema, text = _without_neutral_words(schema, text)
    for path, node in _subschemas(schema):
        if not _CHECKED.isdisjoint(node):
            _check_node(path, node)
    return _with_enforced_patterns(text) if "attern" in text else text


def _without_neutral_words(schema: Any, text: str) -> tuple[Any, str]:
    """The schema and its text without words that restrict nothing. What no value fits is written as llguidance takes
    it."""
    if not any(_may_be_neutral(node) for _, node in _subschemas(schema)):
        return schema, text
    copy = json.loads(text)
    judge = NeutralWords(copy)
    values = _in_values(copy)
    # From the outside in, and judged before any of it is changed.
    schemas = [
        (path, node) for path, node in _subschemas(copy) if _is_schema(path) and id(node) not in values
    ]
    for path, node in schemas:
        if node.get("type", "") is None and not any(node.get(word) is not None for word in _SAY_THE_TYPE):
            raise GrammarRefused("'type' is null: give it a value, or leave it out", _written((path, "type")))
    left_out = [(node, judge.of(node), judge.accepts_none(node)) for _, node in schemas]
    for node, words, fits_none in left_out:
        for word in words:
            del node[word]
        if fits_none:
            node.clear()
            node["allOf"] = [False]
    return copy, _compact(copy)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_schemas(values: Iterable[Any]) -> bool:
    return all(isinstance(value, dict | bool) for value in values)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _may_be_neutral(node: Mapping[str, Any]) -> bool:
    return not LEFT_OUT.isdisjoint(node) or None in node.values() or node.get("type") == "any"


def _in_values(schema: Any) -> set[int]:
    """The ids of what stands in values of `const` and `enum`. A `$ref` may name it, and it must stay as it is."""
    found: set[int] = set()
    for path, node in _subschemas(schema):
        open_ = [node[word] for word in ("const", "enum") if word in node and _is_schema(path)]
        while open_:
            item = open_.pop()
            if isinstance(item, dict | list) and id(item) not in found:
                found.add(id(item))
                open_ += _items(item)
    return found


def _holds(node: Mapping[str, Any], word: str, kind: type[dict[Any, Any] | list[Any]], name: str) -> bool:
    return isinstance(given := node.get(word), kind) and name in given


def _is_schema(path: Path) -> bool:
    """Whether a schema stands there: a `$ref` may point at an object of named schemas instead."""
    return path is None or _HOLDS.get(str(path[1])) != "named"


def locate(schema: Any, reason: str) -> tuple[str, str]:
    """Where in the schema llguidance's `reason` to refuse it stands ("" where that is not known), and the reason in
    words for its author."""
    if found := _UNKNOWN_KEYWORDS.search(reason):
        keywords, judge = _listed(found[1]), NeutralWords(schema)
        places = [
            (path, word, node) for path, node in _subschemas(schema) for word in keywords if word in node
        ]
        places.sort(key=lambda place: judge.is_neutral(place[1], place[2]))  # those were left out
        if places:
            path, keyword, _ = places[0]
            return _written((path, keyword)), f"the keyword '{keyword}' is not supported"
    for fault, word, is_in, why in _FAULTS:
        if told := fault.search(reason):
            for path, node in _subschemas(schema):
                if is_in(node, told):
                    words = [told[0], *told.groups()]
                    return _written((path, word.format(*words))), why.format(*words)
    if _OF_SHAPE.search(reason):
        for path, node in _subschemas(schema):
            for word, (fits, what) in _SHAPES.items():
                if word in node and not fits(node[word]):
                    return _written((path, word)), f"it must be {what}"
    if "oneOf" in reason:
        where = [path for path, node in _subschemas(schema) if "oneOf" in node]
        why = "'oneOf' is only supported where no value can fit two of its schemas; use 'anyOf'"
        return _written((where[0], "oneOf")) if len(where) == 1 else "", why
    if "min/maxProperties" in reason:
        for path, node in _subschemas(schema):
            for keyword in ("minProperties", "maxProperties"):
                if keyword in node and isinstance(node.get("properties"), dict):
                    why = f"'{keyword}' is only supported where all of 'properties' are required"
                    return _written((path, keyword)), why
    for path, node in _subschemas(schema):
        pattern = node.get("pattern")
        if isinstance(pattern, str) and len(pattern) > 1 and (known := _as_given(pattern, reason)):
            return _written((path, "pattern")), known
    return "", reason


def _as_given(pattern: str, reason: str) -> str | None:
    """The reason, with the pattern as its author wrote it; None for the reason to refuse something else."""
    try:
        written = enforced(pattern)
    except ValueError:
        return None
    return reason.replace(written, pattern) if written in reason else None


def _check_depth(schema: Any) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [item for value in level for item in _items(value) if isinstance(item, dict | list)]
        if not level:
            return
    raise GrammarRefused(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _items(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)


def _check_node(path: Path, node: Mapping[str, Any]) -> None:
    least, required = node.get("minProperties"), node.get("required")
    if isinstance(least, int | float):
        named = len({key for key in required if isinstance(key, str)}) if isinstance(required, list) else 0
        if least - named > 1:
            # The keys of additional properties may repeat; those of an object count once.
            why = f"'minProperties' is only supported up to one more than 'required' names ({named + 1} here)"
            raise GrammarRefused(why, _written((path, "minProperties")))
    for word in _NUMBERS:
        if word in node and _has_inexact_number(node[word]):
            why = f"'{word}' has a number beyond 2^53, or of too many digits, that may be read as another one"
            raise GrammarRefused(why, _written((path, word)))
    for word in ("enum", "const"):
        if word in node and _has_unwritten_text(node[word]):
            why = f"'{word}' has a control character that only '\\u' could write, which would be left out"
            raise GrammarRefused(why, _written((path, word)))
    reference = node.get("$ref")
    if isinstance(reference, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", reference) and "$id" not in node:
        why = "'$ref' must point into this schema: others are not fetched"
        raise GrammarRefused(why, _written((path, "$ref")))


def _has_inexact_number(value: Any) -> bool:
    """Whether llguidance, which reads numbers as 64-bit floats, may take one within `value` for another one."""
    open_ = [value]
    while open_:
        item = open_.pop()
        if isinstance(item, dict | list):
            if not _WITHOUT_NUMBERS.issuperset(map(type, _items(item))):
                open_ += _items(item)
        elif isinstance(item, int | float) and (abs(item) > MAX_INTEGER or not _is_read_exactly(item)):
            return True
    return False


def _is_read_exactly(number: float) -> bool:
    if isinstance(number, int):
        return True
    _, digits, exponent = Decimal(repr(number)).normalize().as_tuple()
    few = int("".join(map(str, digits))) <= MAX_INTEGER
    return few and isinstance(exponent, int) and abs(exponent) <= MAX_EXPONENT


def _with_enforced_patterns(text: str) -> str:
    schema = json.loads(text)
    changed = False
    values = _in_values(schema)
    for path, node in list(_subschemas(schema)):
        before, pattern, named = dict(node), node.get("pattern"), node.get("patternProperties")
        if isinstance(pattern, str):
            node["pattern"] = _enforced(pattern, (path, "pattern"))
        if isinstance(named, dict):
            within: Path = (path, "patternProperties")
            node["patternProperties"] = {_enforced(key, (within, key)): value for key, value in named.items()}
        if node != before:
            if id(node) in values:
                why = "a '$ref' names this part of a value, and its pattern cannot be enforced there"
                raise GrammarRefused(why, _written(path))
            changed = True
    return _compact(schema) if changed else text


def _enforced(pattern: str, path: Path) -> str:
    try:
        return enforced(pattern)
    except ValueError as error:
        raise GrammarRefused(f"the pattern {error}", _written(path)) from None


def _has_unwritten_text(value: Any) -> bool:
    open_ = [value]
    while open_:
        item = open_.pop()
        if isinstance(item, dict | list):
            open_ += _items(item)
        elif isinstance(item, str) and not is_written(item):
            return True
    return False


def _subschemas(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each schema in the schema once, with its path, and what a `$ref` names that no keyword holds."""
    open_: list[tuple[Path, Any]] = [(None, schema)]
    seen: set[int] = set()
    while open_:
        path, node = open_.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        inner: list[tuple[Path, Any]] = []
        if isinstance(reference := node.get("$ref"), str):
            inner.append(referenced(schema, reference))
        for name, value in node.items():
            holds = _HOLDS.get(name)
            if holds is None:
                continue
            within: Path = (path, name)
            if isinstance(value, dict):
                if holds == "named":
                    inner += [((within, key), named) for key, named in value.items()]
                else:
                    inner.append((within, value))
            elif isinstance(value, list) and holds == "one or listed":
                inner += [((within, index), listed) for index, listed in enumerate(value)]
        open_ += reversed(inner)


def _written(path: Path) -> str:
    keys: list[str] = []
    while path is not None:
        path, key = path
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(keys)).removeprefix(".")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _listed(text: str) -> list[str]:
    try:
        return [str(item) for item in json.loads(text)]
    except ValueError:
        return []
