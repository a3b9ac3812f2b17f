"""Words of a schema that restrict nothing are left out, and no others."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.neutral_words import NeutralWords
from support import markdown

INTEGERS = {"type": "array", "items": {"type": "integer"}, "maxItems": 2}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = {**OBJECT, "additionalProperties": False}
NEUTRAL: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "propertyNames": True},
    {"type": "object", "propertyNames": {}},
    {"type": "object", "propertyNames": {"title": "key", "type": ["string", "null"], "minLength": 0, "pattern": ".*"}},
    {**INTEGERS, "uniqueItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {**INTEGERS, "contains": {"type": "integer"}, "minContains": 0},
    {**INTEGERS, "contains": {"type": "string"}, "minContains": 0, "maxContains": 2},
    {**INTEGERS, "contains": {"title": "any"}, "minItems": 1},
    {**INTEGERS, "minContains": 3, "maxContains": 1},
    {**INTEGERS, "unevaluatedItems": True},
    {**INTEGERS, "unevaluatedItems": {"description": "any"}},
    {**OBJECT, "unevaluatedProperties": True},
    {**OBJECT, "unevaluatedProperties": {}},
    {**OBJECT, "dependentRequired": {}},
    {**OBJECT, "dependentRequired": {"b": [], "c": ["a"]}},
    {**OBJECT, "dependentSchemas": {}},
    {**OBJECT, "dependentSchemas": {"a": True, "b": {"anyOf": [{"type": "string"}, {}]}}},
    {**OBJECT, "not": False},
    {**OBJECT, "not": {"not": {}}},
    {"type": "string", "not": {"type": "null"}},
    {"type": ["string", "integer"], "not": {"type": ["null", "array"], "minItems": 2}},
    {**OBJECT, "if": True},
    {**OBJECT, "if": {"required": ["b"]}},
    {**OBJECT, "if": {"required": ["b"]}, "then": {}, "else": {"$comment": "any"}},
    {**OBJECT, "if": {"allOf": [{}]}, "else": {"required": ["b"]}},
    {**OBJECT, "if": False, "then": {"required": ["b"]}},
    {**OBJECT, "then": {"required": ["b"]}},
    {**OBJECT, "else": False},
    {**OBJECT, "minProperties": 1},
    {**CLOSED, "properties": {"a": {"type": "integer"}, "b": {}}, "maxProperties": 2},
    {**OBJECT, "$dynamicAnchor": "node"},
    {"type": "string", "format": "password"},
    {"type": "string", "format": ""},
    {"type": "string", "format": "enum", "enum": ["a", "abcd"]},
    {"type": ["array", "null"], "format": "set"},
    {"type": "string", "maxLength": (1 << 53) - 1},
    {**CLOSED, "unevaluatedProperties": False},
    {**OBJECT, "additionalProperties": {"type": "integer"}, "unevaluatedProperties": False},
    {**INTEGERS, "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"anyOf": [{"type": "string"}, {"type": "number"}]}},
    {"type": "object", "propertyNames": {"anyOf": [{"enum": ["a"]}, {"type": "string", "minLength": 0}]}},
]  # fmt: skip
KEPT: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "propertyNames": {"type": "integer"}},
    {"type": "object", "propertyNames": False},
    {**INTEGERS, "uniqueItems": True},
    {**INTEGERS, "contains": {"type": "integer"}},
    {**INTEGERS, "contains": {}},
    {**INTEGERS, "contains": {"type": "integer"}, "minContains": 0, "maxContains": 1},
    {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
    {**OBJECT, "unevaluatedProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"anyOf": [{"maxLength": 3}, {"type": "integer"}]}},
    {"type": "object", "propertyNames": {"anyOf": []}},
    {"type": "object", "propertyNames": {"$ref": "#/nowhere"}},
    {"type": ["string", "null"], "format": "set"},
    {"enum": ["a"], "type": "string", "format": "enums"},
    {**OBJECT, "dependentRequired": {"a": ["b"]}},
    {**OBJECT, "dependentSchemas": {"a": {"maxProperties": 1}}},
    {**OBJECT, "not": {"required": ["b"]}},
    {"type": "integer", "not": {"type": "number"}},
    {"type": "number", "not": {"type": "integer"}},
    {"not": {"type": "null"}},
    {"not": {"const": None}},
    {**OBJECT, "if": {"required": ["b"]}, "then": {"maxProperties": 2}},
    {**OBJECT, "if": True, "then": {"required": ["b"]}},
    {**OBJECT, "if": False, "else": {"required": ["b"]}},
    {**OBJECT, "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    {"type": "string", "format": "phone"},
    {"type": "string", "format": "json-pointer"},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, 2.5, "", "a", "abcd", [], [1], [1, 1], [1, 2], ["a"], [1, "a"], {}, {"a": 1}, {"b": 1},
    {"a": 1, "b": 1}, {"a": 1, "c": "x"}, {"b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}, {"abcd": 1},
    {"a": 1, "abcd": "x"},
]  # fmt: skip
PLACES: list[tuple[Any, Any]] = [
    ({"type": "object", "properties": {"a": None}}, ("properties", "a")),
    ({"anyOf": [None, {"type": "null"}]}, ("anyOf", 0)),
    ({"type": "array", "items": None, "maxItems": 2}, ("items",)),
    ({"$ref": "#/$defs/a", "$defs": {"a": None}}, ("$defs", "a")),
    (
        {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": None}}},
        ("components", "schemas", "a"),
    ),
    ({"type": "object", "additionalProperties": None}, ("additionalProperties",)),
]


def refusal(schema: Any) -> str:
    try:
        return str(LLMatcher.validate_grammar(builders.json_schema(schema)))
    except GrammarRefused as error:
        return error.message


def name(schema: dict[str, Any]) -> str:
    return json.dumps(schema)[:80]


@pytest.mark.parametrize("schema", NEUTRAL, ids=name)
def test_words_that_restrict_nothing_are_left_out(schema: dict[str, Any]) -> None:
    words = NeutralWords(schema).of(schema)
    assert words
    assert not refusal(schema)
    left = {word: value for word, value in schema.items() if word not in words}
    with_them, without = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(left)
    assert [with_them.is_valid(value) for value in VALUES] == [without.is_valid(value) for value in VALUES]


@pytest.mark.parametrize("place", range(len(PLACES)))
def test_at_every_depth(place: int) -> None:
    for schema in NEUTRAL:
        outer, path = json.loads(json.dumps(PLACES[place]))
        node = outer
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = schema
        assert not refusal(outer), (outer, refusal(outer))


def test_names_by_a_reference_and_a_type_that_older_drafts_have() -> None:
    names = {"type": "object", "propertyNames": {"$ref": "#/$defs/K", "title": "k"}}
    assert not refusal({**names, "$defs": {"K": {"type": "string", "description": "a key"}}})
    assert refusal({**names, "$defs": {"K": {"type": "string", "maxLength": 3}}})
    assert refusal({**names, "$defs": {"K": {"$ref": "#/$defs/K"}}})
    assert not refusal({"type": "object", "properties": {"a": {"type": "any", "description": "x"}}})
    assert refusal({"type": "any", "not": {"type": "null"}})


@pytest.mark.parametrize("schema", KEPT, ids=name)
def test_words_that_restrict_are_refused(schema: dict[str, Any]) -> None:
    assert refusal(schema)


def test_a_choice_that_nothing_fits() -> None:
    never = {"not": {}}
    for schema in ({"anyOf": [never, {"type": "string", "enum": ["x"]}]}, {"type": "array", "items": never}):
        assert not refusal({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    for schema in (never, {"required": ["a"], "properties": {"a": never}, "type": "object"}):
        assert "nsatisfiable" in refusal(schema)


@pytest.mark.parametrize(
    "word",
    [
        "properties",
        "required",
        "items",
        "additionalProperties",
        "format",
        "pattern",
        "minLength",
        "not",
        "enum",
    ],
)
def test_a_null_asks_for_nothing(word: str) -> None:
    """Libraries write the words that they leave out as null."""
    assert not refusal({"type": "object", word: None, "description": None})


def test_a_null_type_by_itself_is_refused() -> None:
    """YAML reads `type: null` so, and what was meant would be lost."""
    with pytest.raises(GrammarRefused, match="is null: give it a value") as caught:
        builders.json_schema({"properties": {"a": {"anyOf": [{"type": None}]}}})
    assert caught.value.path == "properties.a.anyOf[0].type"
    assert not refusal({"type": None, "anyOf": [{"type": "string", "enum": None}], "$ref": None})


@pytest.mark.parametrize("word", ["const", "enum"])
@pytest.mark.parametrize("part", [{"format": "text", "a": None, "x": 1}, {"not": {}, "x": 1}, {"not": None}])
def test_a_value_that_a_reference_names_stays_as_it_is(word: str, part: dict[str, Any]) -> None:
    value = [{"inner": part}]
    schema = builders.json_schema({word: value, "properties": {"a": {"$ref": f"#/{word}/0/inner"}}})
    assert f'"{word}":{json.dumps(value, separators=(",", ":"))}' in schema


def test_a_pattern_in_a_value_that_a_reference_names_is_refused() -> None:
    part = {"const": {"pattern": "[^a]"}, "items": {"$ref": "#/const"}}
    with pytest.raises(GrammarRefused, match="cannot be enforced there") as caught:
        builders.json_schema(part)
    assert caught.value.path == "const"
    assert not refusal(part | {"const": {"pattern": "a"}})


def test_many_dependencies_take_linear_time() -> None:
    names = [f"k{number:04}" for number in range(1900)]
    schema = {"required": names, "dependentRequired": {name: [names[0]] for name in names}}
    began = time.process_time()
    assert NeutralWords(schema).of(schema) == ["dependentRequired"]
    assert time.process_time() - began < 0.2


def test_a_null_constant_is_one() -> None:
    schema = builders.json_schema({"const": None})
    assert '"const":null' in schema


def test_an_object_of_schemas_is_no_schema() -> None:
    """A `$ref` may point at one, in which "then" is the name of a property."""
    named = {"properties": {"then": {"type": "string"}}, "required": ["then"], "type": "object"}
    schema = {**named, "anyOf": [{}, {"$ref": "#/properties"}], "uniqueItems": False}
    assert '"then":{"type":"string"}' in builders.json_schema(schema)


def test_deep_conditions_take_linear_time() -> None:
    node: dict[str, Any] = {}
    for _ in range(60):
        node = {"if": node, "then": {}, "else": {}, "minContains": 0, "maxContains": 9, "maxItems": 1}
    began = time.process_time()
    assert not refusal(node)
    assert time.process_time() - began < 2


def test_the_documented_forms() -> None:
    rows = markdown.rows(markdown.read("docs/structured-output.md"), "restrict nothing", "where")
    forms = list(itertools.chain.from_iterable(cells[0].split("`")[1::2] for cells in rows))
    assert len(forms) > 15
    for form in forms:
        schema = json.loads(f"{{{form}}}")
        assert not refusal(schema), form
