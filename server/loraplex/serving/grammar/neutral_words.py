"""Words of a JSON schema that restrict nothing where they stand.

Libraries that write schemas put many of them in, such as `propertyNames: {"type": "string"}` beside each record.
llguidance refuses a keyword that it does not enforce, whatever its value, so those are left out before it sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

_Node = Mapping[str, Any]
Path = tuple["Path", str | int] | None
"""From the inside out, because a written one for each of many nested schemas would take the square of their size."""

ANNOTATIONS = frozenset(
    (
        "title", "description", "$comment", "example", "examples", "default", "deprecated", "readOnly", "writeOnly",
        "contentEncoding", "contentMediaType", "contentSchema", "$schema", "$id", "id", "$anchor", "$dynamicAnchor",
        "$recursiveAnchor", "$vocabulary", "$defs", "definitions",
    )
)  # fmt: skip
"""Words that describe, name or hold something for others."""
LEFT_OUT = frozenset(
    (
        "$dynamicAnchor", "$recursiveAnchor", "contains", "dependencies", "dependentRequired", "dependentSchemas",
        "else", "format", "if", "maxContains", "maxLength", "maxProperties", "minContains", "minProperties",
        "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    )
)  # fmt: skip
"""Words that llguidance may refuse."""
FORMATS_OF_ANY_TEXT = ("binary", "commonmark", "markdown", "multiline", "password", "text", "textarea", "")
LONGEST = 1 << 32
"""Characters that no answer has: a context has far fewer tokens."""
_MATCH_ALL = ("", "^", "$", ".*", "^.*", ".*$", "(.*)", r"[\s\S]*", r"^[\s\S]*", r"^[\s\S]*$")
_ALL_TYPES = frozenset(("string", "null", "object", "array", "boolean", "number"))
_MAY_BE_NULL = frozenset(("const", "default", "example", "examples"))


class NeutralWords:
    """The judge of one schema. Each part of it is looked at once, so the work is linear in its size."""

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self._accepts_all: dict[int, bool] = {}
        self._fits_names: dict[str, bool] = {}

    def of(self, node: _Node) -> list[str]:
        """Words of the schema `node` to leave out."""
        return [
            word
            for word, value in node.items()
            if (word in LEFT_OUT or value is None or (word, value) == ("type", "any"))
            and self.is_neutral(word, node)
        ]

    def accepts_all(self, schema: object) -> bool:
        """Whether each JSON value fits the schema, as far as can be seen."""
        if not isinstance(schema, dict):
            return schema is True
        known = self._accepts_all.get(id(schema))
        if known is None:
            known = self._accepts_all[id(schema)] = all(self.is_neutral(word, schema) for word in schema)
        return known

    def accepts_none(self, schema: object) -> bool:
        """Whether no JSON value fits the schema, as far as can be seen."""
        return schema is False or (isinstance(schema, dict) and self.accepts_all(schema.get("not")))

    def is_neutral(self, word: str, node: _Node) -> bool:
        """Whether the schema `node` means the same without this word of it."""
        if word in ANNOTATIONS:
            return True
        if node[word] is None:
            return word not in _MAY_BE_NULL
        rule = _RULES.get(word)
        return rule is not None and rule(self, node[word], node)

    def _are_all(self, schemas: object) -> bool:
        """Whether each JSON value fits each of the schemas, which are listed or named."""
        listed = list(schemas.values()) if isinstance(schemas, dict) else schemas
        return isinstance(listed, list) and all(map(self.accepts_all, listed))

    def _property_names(self, value: Any, _: _Node) -> bool:
        """Whether each string fits."""
        if not isinstance(value, dict) or not isinstance(name := value.get("$ref"), str):
            return self._fits_strings(value)
        if name not in self._fits_names:
            self._fits_names[name] = self._fits_strings(referenced(self._schema, name)[1])
        others = {word: of for word, of in value.items() if word != "$ref"}
        return self._fits_names[name] and self._fits_strings(others)

    def _fits_strings(self, schema: Any) -> bool:
        if not isinstance(schema, dict):
            return schema is True
        return all(
            (word == "type" and "string" in _types(schema))
            or (word == "anyOf" and isinstance(of, list) and any(map(self._is_of_strings, of)))
            or self.is_neutral(word, schema)
            for word, of in schema.items()
        )

    def _is_of_strings(self, schema: Any) -> bool:
        """Whether each string fits a schema of a choice, which holds no further choice."""
        return isinstance(schema, dict) and "anyOf" not in schema and self._fits_strings(schema)

    def _dependencies(self, value: Any, node: _Node) -> bool:
        required = _required(node)
        return isinstance(value, dict) and all(
            set(map(repr, needed)) <= required if isinstance(needed, list) else self.accepts_all(needed)
            for needed in value.values()
        )

    def _not(self, value: Any, node: _Node) -> bool:
        """Whether no value is excluded, or only values of other types than the node's."""
        own, others = _types(node), _types(value) if isinstance(value, dict) else frozenset[str]()
        overlap = own & others or {"number", "integer"} <= own | others
        return self.accepts_none(value) or bool(own and others and not overlap)

    def _conditional(self, _: Any, node: _Node) -> bool:
        """Whether no branch that can be chosen restricts anything."""
        if "if" not in node:
            return True
        branches = [] if self.accepts_none(node["if"]) else [node.get("then", True)]
        branches += [] if self.accepts_all(node["if"]) else [node.get("else", True)]
        return all(map(self.accepts_all, branches))

    def _contains(self, _: Any, node: _Node) -> bool:
        """Whether as many items fit as it asks for, and there cannot be too many."""
        if "contains" not in node:
            return True
        least, most = node.get("minContains", 1), node.get("maxContains")
        if most is not None and not _at_most(node.get("maxItems"), most):
            return False
        return _at_most(least, 0) or (
            self.accepts_all(node["contains"]) and _at_most(least, node.get("minItems"))
        )


def _types(node: _Node) -> frozenset[str]:
    """The types that the node lists; none where it lists none. Draft 3 has "any" too."""
    given = node.get("type")
    listed = given if isinstance(given, list) else [given]
    return frozenset(name for name in listed if isinstance(name, str) and "any" not in listed)


def _has_no_text(node: _Node) -> bool:
    return bool(types := _types(node)) and "string" not in types


def _required(node: _Node) -> set[str]:
    names = node.get("required")
    return {repr(name) for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _at_most(number: object, limit: object) -> bool:
    """Whether both are numbers, and the first is no larger."""
    if isinstance(number, bool) or isinstance(limit, bool):
        return False
    return isinstance(number, int | float) and isinstance(limit, int | float) and number <= limit


def _names_all(value: Any, node: _Node) -> bool:
    """Whether `maxProperties` holds for an object whose properties are all named."""
    named = node.get("properties")
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return closed and isinstance(named, dict) and _at_most(len(named), value)


def referenced(schema: Any, reference: str) -> tuple[Path, Any]:
    """The value that a JSON pointer behind `#` names in the whole schema, with its path; None if it names nothing."""
    path: Path = None
    node = schema
    for part in unquote(reference.partition("#")[2]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node, path = node.get(key), (path, key)
        elif (
            isinstance(node, list)
            and key.isascii()
            and key.isdigit()
            and len(key) < 6
            and int(key) < len(node)
        ):
            node, path = node[int(key)], (path, int(key))
        else:
            return None, None
    return path, node


_Rule = Callable[[NeutralWords, Any, _Node], bool]
_IS_ALL: _Rule = lambda judge, value, node: judge.accepts_all(value)  # noqa: E731 - a row of the table
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "additionalItems": _IS_ALL,
        "additionalProperties": _IS_ALL,
        "allOf": lambda judge, value, node: judge._are_all(value),
        "anyOf": lambda judge, value, node: isinstance(value, list) and any(map(judge.accepts_all, value)),
        "contains": NeutralWords._contains,
        "dependencies": NeutralWords._dependencies,
        "dependentRequired": NeutralWords._dependencies,
        "dependentSchemas": lambda judge, value, node: judge._are_all(value),
        "else": NeutralWords._conditional,
        "format": lambda judge, value, node: (
            value in FORMATS_OF_ANY_TEXT or (value == "enum" and "enum" in node) or _has_no_text(node)
        ),
        "if": NeutralWords._conditional,
        "items": lambda judge, value, node: value == [] or judge.accepts_all(value),
        "maxContains": NeutralWords._contains,
        "maxLength": lambda judge, value, node: _at_most(LONGEST, value),
        "maxProperties": lambda judge, value, node: _names_all(value, node),
        "minContains": NeutralWords._contains,
        "minItems": lambda judge, value, node: _at_most(value, 0),
        "minLength": lambda judge, value, node: _at_most(value, 0),
        "minProperties": lambda judge, value, node: _at_most(value, len(_required(node))),
        "not": NeutralWords._not,
        "pattern": lambda judge, value, node: value in _MATCH_ALL,
        "patternProperties": lambda judge, value, node: judge._are_all(value),
        "prefixItems": lambda judge, value, node: judge._are_all(value),
        "properties": lambda judge, value, node: judge._are_all(value),
        "propertyNames": NeutralWords._property_names,
        "required": lambda judge, value, node: value == [],
        "then": NeutralWords._conditional,
        "type": lambda judge, value, node: value == "any" or _types(node) >= _ALL_TYPES,
        "unevaluatedItems": lambda judge, value, node: (
            isinstance(node.get("items"), dict | bool) or judge.accepts_all(value)
        ),
        # What the others judge is evaluated.
        "unevaluatedProperties": lambda judge, value, node: (
            isinstance(node.get("additionalProperties"), dict | bool) or judge.accepts_all(value)
        ),
        "uniqueItems": lambda judge, value, node: value is False or _at_most(node.get("maxItems"), 1),
    }
)
"""When a word restricts nothing; one that is not here always restricts."""
