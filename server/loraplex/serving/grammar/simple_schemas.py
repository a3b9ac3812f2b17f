"""Schemas that need no trial: how they are made bounds what their grammars cost.

A simple schema holds objects, arrays, strings, numbers and choices, a bounded number of each. It has nothing that
multiplies: no pattern, no two schemas for the same value, no reference to itself. Some value fits it, and llguidance
enforces each of its keywords. Every other schema gets a trial.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from loraplex.serving.grammar.patterns import is_written

MAX_CHARS = 16 << 10
"""Of the grammar's text."""
MAX_SCHEMAS = 256
"""Schemas within the schema, definitions included."""
MAX_NAMES = 64
"""Of the properties of one object."""
MAX_CHOICES = 256
"""Of all `enum` together."""
MAX_LENGTH = 1 << 15
"""Characters of a string."""
MAX_ITEMS = 64
MAX_BOUND = 10**9
"""Of a number, up and down."""
MAX_COSTLY = 16
"""Formats, and numbers with a bound, together. Each takes as long to build as ten other schemas."""

_DRAFTS = frozenset(
    [f"http://json-schema.org/draft-{draft}/schema" for draft in ("04", "06", "07")]
    + [f"https://json-schema.org/draft/{draft}/schema" for draft in ("2019-09", "2020-12")]
)
_ID = re.compile(r"https?://[a-zA-Z0-9.-]+(/[a-zA-Z0-9._/-]*)?#?")
_DEFINITIONS = ("$defs", "definitions")
_LENGTHS = frozenset(("minLength", "maxLength"))
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_FORMATS = frozenset(("date-time", "time", "date", "email", "ipv4", "uri", "uuid"))
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "string": _LENGTHS | {"format"},
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
_ANY_TYPE = [name for name in _OF_TYPE if name != "integer"]
_READ = frozenset(("$ref", "type", "enum", "const", "anyOf", "oneOf")).union(*_OF_TYPE.values())
_TRIED = frozenset(
    (
        *("$schema", "$id", "id", "$defs", "definitions", "x-guidance", "extends", "disallow", "divisibleBy"),
        *("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "$vocabulary"),
        *("allOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("prefixItems", "additionalItems", "unevaluatedItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "minProperties", "maxProperties"),
        *("patternProperties", "propertyNames", "unevaluatedProperties", "pattern", "multipleOf"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""What needs a trial, or stands at the top alone. JSON Schema has no other keyword that restricts a value."""
_CLASSES: Mapping[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
}
_WITHOUT_TYPE = (str, int, bool, type(None))


def is_simple(schema: Any, text: str) -> bool:
    """Whether an engine may get `text`, the grammar of `schema`, without a trial. It takes less time than it took to
    write the text."""
    if not isinstance(schema, dict) or len(text) > MAX_CHARS:
        return False
    try:
        _Walk(schema).read()
    except _NeedsTrialError:
        return False
    return True


class _NeedsTrialError(Exception):
    pass


def _must(condition: bool) -> None:
    if not condition:
        raise _NeedsTrialError


class _Walk:
    """One pass over a schema. Raises _NeedsTrialError."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._top = dict(schema)
        self._definitions: dict[str, Any] = {}
        self._is_read: dict[str, bool] = {}
        """By reference: whether its definition was read to the end. False while it is being read."""
        self._left_schemas = MAX_SCHEMAS
        self._left_choices = MAX_CHOICES
        self._left_costly = MAX_COSTLY
        self._checks: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "array": self._array,
            "object": self._object,
        }

    def read(self) -> None:
        draft = self._top.pop("$schema", "")
        _must(isinstance(draft, str) and draft.removesuffix("#") in {"", *_DRAFTS})
        for word in ("id", "$id"):
            given = self._top.pop(word, "")
            _must(isinstance(given, str) and (not given or _ID.fullmatch(given) is not None))
        for word in _DEFINITIONS:
            named = self._top.pop(word, {})
            _must(isinstance(named, dict))
            self._definitions |= {f"#/{word}/{name}": value for name, value in named.items()}
        self._schema(self._top)
        for reference in self._definitions:
            self._reference(reference)

    def _schema(self, schema: Any) -> None:
        self._left_schemas -= 1
        _must(isinstance(schema, dict) and self._left_schemas >= 0)
        words = schema.keys() & _READ
        _must(_TRIED.isdisjoint(schema))
        if "$ref" in words:
            _must(len(words) == 1)
            self._reference(schema["$ref"])
        elif "anyOf" in words or "oneOf" in words:
            _must(len(words) == 1)
            self._disjoint(schema.get("anyOf", schema.get("oneOf")))
        elif "enum" in words or "const" in words:
            _must(len(words - {"type"}) == 1)
            self._choices(schema["enum"] if "enum" in words else [schema["const"]], schema.get("type"))
        else:
            self._typed(schema, words)

    def _reference(self, reference: Any) -> None:
        _must(isinstance(reference, str) and reference in self._definitions)
        # No pointer with escapes, or into a definition.
        _must(re.fullmatch(r"#/[^/]*/[A-Za-z0-9_.-]+", reference) is not None)
        if reference not in self._is_read:
            self._is_read[reference] = False
            self._schema(self._definitions[reference])
            self._is_read[reference] = True
        _must(self._is_read[reference])

    def _disjoint(self, schemas: Any) -> None:
        """A value's first character says which one it has to fit."""
        _must(isinstance(schemas, list) and bool(schemas))
        types = [schema.get("type") if isinstance(schema, dict) else None for schema in schemas]
        _must(all(isinstance(name, str) for name in types))
        _must(len({"number" if name == "integer" else name for name in types}) == len(types))
        for schema in schemas:
            self._schema(schema)

    def _choices(self, values: Any, name: Any) -> None:
        _must(isinstance(values, list) and bool(values))
        self._left_choices -= len(values)
        _must(self._left_choices >= 0 and (name is None or (isinstance(name, str) and name in _CLASSES)))
        classes = _WITHOUT_TYPE if name is None else _CLASSES[name]
        _must(all(type(value) in classes for value in values))
        _must(all(map(_is_spelled, values)))

    def _typed(self, schema: Mapping[str, Any], words: set[str]) -> None:
        names = schema.get("type", _ANY_TYPE)
        names = [names] if isinstance(names, str) else names
        _must(isinstance(names, list) and bool(names) and all(isinstance(name, str) for name in names))
        _must(len(set(names)) == len(names) and not {"integer", "number"} <= set(names))
        words.discard("type")
        for name in names:
            _must(name in _OF_TYPE)
            if used := words & _OF_TYPE[name]:
                words -= used
                self._checks[name](schema)
        _must(not words)

    def _string(self, schema: Mapping[str, Any]) -> None:
        _sizes(schema, "minLength", "maxLength", MAX_LENGTH)
        if "format" in schema:
            _must(schema["format"] in _FORMATS and _LENGTHS.isdisjoint(schema))
            self._costly()

    def _number(self, schema: Mapping[str, Any]) -> None:
        self._costly()
        words = _BOUNDS & schema.keys()
        for word in words:
            bound = schema[word]
            _must(type(bound) is int or (type(bound) is float and bound.is_integer()))
            _must(abs(bound) <= MAX_BOUND)
        _must(not {"minimum", "exclusiveMinimum"} <= words and not {"maximum", "exclusiveMaximum"} <= words)
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        high = schema.get("maximum", schema.get("exclusiveMaximum"))
        if low is not None and high is not None:
            # Between two exclusive ones there has to be an integer.
            _must(high - low >= (0 if words == {"minimum", "maximum"} else 2))

    def _costly(self) -> None:
        self._left_costly -= 1
        _must(self._left_costly >= 0)

    def _array(self, schema: Mapping[str, Any]) -> None:
        _sizes(schema, "minItems", "maxItems", MAX_ITEMS)
        if "items" in schema:
            self._schema(schema["items"])

    def _object(self, schema: Mapping[str, Any]) -> None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        _must(isinstance(properties, dict) and isinstance(required, list))
        _must(all(isinstance(name, str) for name in required))
        names = properties.keys() | set(required)
        _must(all(map(_is_spelled, names)))
        _must(len(names) <= MAX_NAMES and (others is not False or len(names) == len(properties)))
        for value in properties.values():
            self._schema(value)
        if not isinstance(others, bool):
            self._schema(others)


def _is_spelled(value: Any) -> bool:
    return not isinstance(value, str) or is_written(value)


def _sizes(schema: Mapping[str, Any], least: str, most: str, bound: int) -> None:
    low, high = schema.get(least, 0), schema.get(most, bound)
    _must(type(low) is int and type(high) is int and 0 <= low <= high <= bound)
