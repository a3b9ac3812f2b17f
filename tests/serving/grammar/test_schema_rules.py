"""Limits of schemas, and where in a schema a refusal is."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from llguidance import LLMatcher

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.schema_rules import locate

UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f\x7f"


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def refused(schema: Any) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as caught:
        builders.json_schema(schema)
    return caught.value


def test_schema_of_64_levels_passes_and_one_more_is_refused() -> None:
    builders.json_schema(nested(64))
    assert "nested more than 64 levels" in refused(nested(65)).message


def test_schema_of_64_kib_passes_and_one_byte_more_is_refused() -> None:
    room = 65_536 - len('{"const":""}')
    builders.json_schema({"const": "a" * room})
    assert "has 65537 bytes; at most 65536" in refused({"const": "a" * (room + 1)}).message
    assert "has 65538 bytes; at most 65536" in refused({"const": "é" * (room // 2 + 1)}).message


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"$ref": "https://example.com/a.json"}, "$ref"),
        (
            {"properties": {"a": {"anyOf": [{}, {"$ref": "file:///etc/passwd"}]}}},
            "properties.a.anyOf[1].$ref",
        ),
        ({"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": 3}, "$schema"),
        ({"items": {"minProperties": 2}}, "items.minProperties"),
        ({"items": {"enum": [1, {"a": [2**53 + 1]}]}}, "items.enum"),
        ({"const": -(2**64 - 1)}, "const"),
        ({"minimum": 10**4000}, "minimum"),
        ({"const": 1e300}, "const"),
        ({"minimum": -1e22}, "minimum"),
        ({"enum": [1, [0.20334339213767794]]}, "enum"),
        ({"exclusiveMaximum": 7.98e-27}, "exclusiveMaximum"),
        ({"const": "a\x7fb"}, "const"),
        ({"items": {"pattern": r"a\x01b"}}, "items.pattern"),
        ({"patternProperties": {"^a": {}, "^\x7f": {}}}, "patternProperties.^\x7f"),
        ({"items": {"enum": [1, {"a": ["b", "\0"]}]}}, "items.enum"),
        ({"$defs": {"a": {"required": ["x"], "minProperties": 3}}}, "$defs.a.minProperties"),
    ],
)
def test_what_would_not_be_enforced_is_refused_at_its_place(schema: Any, path: str) -> None:
    assert refused(schema).path == path


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"minProperties": 1},
        {"enum": [2**53 - 1, -(2**53), 0.1, -1e-22, 3.141592653589793, 1e15, 0.0], "maximum": 10**15},
        {"properties": {"const": {"title": "a", "default": 2**64 - 1}}},
        {"required": ["a", "b"], "minProperties": 3, "type": "object"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"properties": {"x-guidance": {"type": "string"}}},
        {"const": {"$ref": "https://example.com", "minProperties": 9}},
        {"enum": ["\b\t\n\f\r\x80"], "title": "\x7f"},
    ],
)
def test_what_is_enforced_passes(schema: Any) -> None:
    builders.json_schema(schema)


@pytest.mark.parametrize("schema", [{"const": 1e999}, {"items": {"default": -1e999}}])
def test_number_that_no_json_writes_is_refused(schema: Any) -> None:
    assert "larger than any 64-bit float" in refused(schema).message


@pytest.mark.parametrize("schema", [False, 3, None, [], "{}"])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    assert refused(schema).message


@pytest.mark.parametrize(
    ("schema", "reason", "path", "said"),
    [
        (
            {"properties": {"a": {"type": "array", "items": {"not": {}}}}},
            'Unimplemented keys: ["not"]',
            "properties.a.items.not",
            "the keyword 'not' is not supported",
        ),
        (
            {"uniqueItems": False, "items": {"uniqueItems": True}},
            'Unimplemented keys: ["uniqueItems"]',
            "items.uniqueItems",
            "the keyword 'uniqueItems'",
        ),
        (
            {"required": ["a"], "properties": {"a": {"enum": []}}},
            "Unsatisfiable schema: required property 'a' is unsatisfiable",
            "properties.a",
            "no value fits it",
        ),
        (
            {"items": {"minLength": -1}},
            "Expected integer for 'minLength', got -1",
            "items.minLength",
            "integer",
        ),
        (
            {"items": {"$ref": "#/nope"}},
            "Pointer '/nope' does not exist",
            "items.$ref",
            "nothing stands at '/nope'",
        ),
        ({"items": {"enum": "x"}}, "enum must be an array", "items.enum", "must be an array"),
        ({"properties": {"not": {}}, "if": {}}, 'Unimplemented keys: ["if"]', "if", "the keyword 'if'"),
        ({"$defs": {"f": {"format": "html"}}}, "Unknown format: html", "$defs.f.format", "the format 'html'"),
        (
            {"prefixItems": [{}, {"pattern": "(?=a)b"}]},
            "regex parse error: (?=a)b",
            "prefixItems[1].pattern",
            "regex",
        ),
        (
            {"items": {"pattern": '[^"]['}},
            f'regex parse error: [[^"]--{UNWRITTEN}][',
            "items.pattern",
            'regex parse error: [^"][',
        ),
        ({"anyOf": [{"pattern": "\0"}, {"pattern": "b*"}]}, "is empty: b*", "anyOf[1].pattern", "is empty"),
        (
            {"allOf": [{"oneOf": [{}, {}]}]},
            "oneOf constraints are not supported",
            "allOf[0].oneOf",
            "use 'anyOf'",
        ),
        ({"anyOf": [{"oneOf": []}, {"oneOf": []}]}, "oneOf constraints are not", "", "use 'anyOf'"),
        (
            {"minProperties": 1, "items": {"maxProperties": 1, "properties": {"a": {}, "b": {}}}},
            "min/maxProperties only supported when all keys",
            "items.maxProperties",
            "'maxProperties' is only supported where",
        ),
        (
            {
                "$defs": {"x": {"properties": None}, "y": {"properties": {"a": 1}, "required": 7}},
                "anyOf": [{"required": ["a"], "properties": {"a": False}}],
            },
            "required property 'a' is unsatisfiable",
            "anyOf[0].properties.a",
            "no value fits it",
        ),
        ({"type": "foo"}, "Invalid type: foo", "type", "'foo' is no type of JSON Schema"),
        ({}, "Unimplemented keys: [broken", "", "Unimplemented keys"),
    ],
)
def test_reason_of_the_library_gets_its_place(schema: Any, reason: str, path: str, said: str) -> None:
    found, words = locate(schema, reason)
    assert found == path
    assert said in words


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "OBJECT"}, "type"),
        ({"type": ["string", "strng"]}, "type"),
        ({"type": True}, "type"),
        ({"type": [1]}, "type"),
        ({"enum": {}}, "enum"),
        ({"properties": {"a": 1}}, "properties"),
        ({"properties": []}, "properties"),
        ({"patternProperties": {"a": 1}}, "patternProperties"),
        ({"required": [1]}, "required"),
        ({"items": 0}, "items"),
        ({"prefixItems": ["x"]}, "prefixItems"),
        ({"additionalProperties": 0}, "additionalProperties"),
        ({"anyOf": ["x"]}, "anyOf"),
        ({"allOf": {}}, "allOf"),
        ({"minLength": 10**30}, "minLength"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"$ref": 7}, "$ref"),
        ({"$ref": "other.json"}, "$ref"),
        ({"$schema": "http://x"}, "$schema"),
    ],
)
def test_a_refusal_names_its_field(schema: dict[str, Any], path: str) -> None:
    asked = {"type": "object", "properties": {"q": schema}, "required": ["q"]}
    reason = LLMatcher.validate_grammar(builders.json_schema(asked))
    found, words = locate(asked, reason)
    assert found == f"properties.q.{path}"
    assert "json-schema:" not in words


def test_long_names_above_many_schemas_cost_no_square_of_memory() -> None:
    schema = {"properties": {"n" * 30_000: {"anyOf": [{"a": 1}] * 3000}}}
    tracemalloc.start()
    try:
        builders.json_schema(schema)
        assert locate(schema, 'Unimplemented keys: ["not"]') == ("", 'Unimplemented keys: ["not"]')
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("hidden", "place"),
    [
        ({"type": "string", "pattern": "^a\u0001b$"}, "x.a/b.pattern"),
        ({"const": 2**53 + 1}, "x.a/b.const"),
        ({"anyOf": [{"enum": ["a\u0001"]}]}, "x.a/b.anyOf[0].enum"),
        ({"type": "object", "minProperties": 3}, "x.a/b.minProperties"),
    ],
)
def test_what_a_reference_names_is_checked_wherever_it_is(hidden: Any, place: str) -> None:
    """Behind a keyword that is none, which no walk over keywords finds."""
    schema = {"type": "object", "properties": {"p": {"$ref": "#/x/a~1b"}}, "x": {"a/b": hidden}}
    assert refused(schema).path == place


def test_references_that_lead_to_each_other_or_nowhere_are_walked_once() -> None:
    schema = {
        "$ref": "#/x/0",
        "x": [{"$ref": "#/x/1"}, {"$ref": "#/x/0", "anyOf": [{"$ref": "#/y"}, {"$ref": "#"}]}],
    }
    builders.json_schema(schema)
