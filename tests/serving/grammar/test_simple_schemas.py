"""Schemas that reach an engine without a trial: each would pass it, for little."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLTokenizer

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.simple_schemas import (
    MAX_BOUND,
    MAX_CHARS,
    MAX_CHOICES,
    MAX_COSTLY,
    MAX_ITEMS,
    MAX_LENGTH,
    MAX_NAMES,
    MAX_SCHEMAS,
    is_simple,
)
from loraplex.serving.grammar.worker import _trial
from support.models.walking import walk

MAX_TRIAL_S = 0.02
BYTES = LLTokenizer("byte")
NAMES = [*"abcdefgh", "é", '"', "\n", "/", "~", "%", "$ref", "type", "<|im_end|>", "", "漢" * 9]
FORMATS = ["date-time", "time", "date", "email", "ipv4", "uri", "uuid"]

names = st.one_of(st.sampled_from(NAMES), st.text("xy", max_size=40))
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=9))
sizes = st.one_of(st.integers(0, 3), st.integers(0, MAX_ITEMS))
lengths = st.one_of(st.integers(0, 3), st.integers(0, MAX_LENGTH))
bounds = st.one_of(st.integers(-3, 3), st.integers(-MAX_BOUND, MAX_BOUND), st.just(2.0))
notes = st.fixed_dictionaries(
    {},
    optional={
        "title": st.text(max_size=9),
        "default": scalars,
        "examples": st.lists(scalars, max_size=2),
        "readOnly": st.booleans(),
        "x-own": scalars,
        "nullable": st.booleans(),
    },
)


def some(**words: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=words)


def ordered(least: str, most: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.tuples(values, values).map(lambda pair: {least: min(pair), most: max(pair)}),
        some(**{least: values}),
        some(**{most: values}),
    )


def of_type(name: str, words: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    types = st.sampled_from([{"type": name}, {"type": [name, "null"]}, {"type": ["boolean", name]}])
    untyped = types if name == "integer" else st.one_of(types, st.just({}))
    return st.tuples(untyped, words).map(lambda pair: pair[0] | pair[1])


def within(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Simple schemas of others, and some that are nearly so."""
    properties = st.dictionaries(names, schemas, max_size=8)
    typed = [
        of_type("object", some(properties=properties, required=st.lists(names, max_size=3))),
        of_type(
            "object", some(additionalProperties=st.one_of(st.booleans(), schemas), properties=properties)
        ),
        of_type("array", st.tuples(some(items=schemas), ordered("minItems", "maxItems", sizes)).map(joined)),
        of_type("string", ordered("minLength", "maxLength", lengths)),
        of_type("string", some(format=st.sampled_from(FORMATS))),
        of_type("integer", ordered("minimum", "maximum", bounds)),
        of_type("number", ordered("exclusiveMinimum", "maximum", bounds)),
        of_type("number", ordered("minimum", "exclusiveMaximum", bounds)),
    ]
    apart = st.lists(
        st.sampled_from(["string", "integer", "null", "array", "object"]), min_size=1, unique=True
    ).map(lambda kinds: [{"type": kind} for kind in kinds])
    chosen = [
        st.lists(scalars, min_size=1, max_size=5).map(lambda values: {"enum": values}),
        st.lists(st.text(max_size=5), min_size=1).map(lambda values: {"enum": values, "type": "string"}),
        scalars.map(lambda value: {"const": value}),
        apart.map(lambda kinds: {"anyOf": kinds}),
        apart.map(lambda kinds: {"oneOf": kinds}),
        st.sampled_from(["#/$defs/x", "#/definitions/y"]).map(lambda reference: {"$ref": reference}),
    ]
    nearly = st.tuples(
        st.one_of(*typed, *chosen),
        st.one_of(
            some(pattern=st.just("a+"), uniqueItems=st.just(True), minProperties=st.integers(0, 2)),
            some(type=st.sampled_from(["any", "string", "integer", []]), enum=st.lists(scalars, max_size=3)),
            some(anyOf=st.lists(schemas, max_size=3), oneOf=st.lists(schemas, max_size=3)),
            some(**{"$ref": st.sampled_from(["#/$defs/z", "#", "#/$defs/x/items"])}),
            some(minLength=lengths, maxLength=lengths, minimum=bounds, maximum=bounds, minItems=sizes),
        ),
    ).map(joined)
    usual = st.one_of(*typed, *chosen)
    return st.tuples(notes, st.one_of(usual, usual, usual, usual, usual, usual, nearly)).map(joined)


def joined(pair: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    return pair[0] | pair[1]


schemas = st.recursive(within(st.just({"type": "string"})), within, max_leaves=8)
wholes = st.builds(
    lambda schema, x, y, top: {**schema, "$defs": {"x": x}, "definitions": {"y": y}, **top},
    schemas,
    st.one_of(st.just({"type": "string"}), schemas),
    st.one_of(st.just({"type": "integer"}), schemas),
    some(
        **{
            "$schema": st.sampled_from(
                [
                    "http://json-schema.org/draft-04/schema#",
                    "http://json-schema.org/draft-07/schema",
                    "https://json-schema.org/draft/2019-09/schema",
                    "https://json-schema.org/draft/2020-12/schema",
                ]
            ),
            "$id": st.sampled_from(["https://a.example/b_c/d-1.json", "http://a.example#"]),
            "id": st.just("https://a.example/b.json#"),
        }
    ),
)


def passes(schema: dict[str, Any], tokenizer: LLTokenizer = BYTES) -> str:
    """The grammar of a simple schema, which has passed a short trial."""
    text = builders.json_schema(schema)
    assert is_simple(schema, text)
    for _ in range(3):  # one may have to collect what other tests have left
        began = time.process_time()
        reason = _trial(text, tokenizer)
        took = time.process_time() - began
        if took < MAX_TRIAL_S:
            break
    assert (reason, took < MAX_TRIAL_S) == ("", True), (reason, took, schema)
    return text


@given(wholes, st.integers(0, 1 << 30))
def test_simple_schema_passes_a_trial_and_is_enforced(schema: dict[str, Any], seed: int) -> None:
    try:
        assume(is_simple(schema, builders.json_schema(schema)))
    except GrammarRefused:
        assume(False)
    text = passes(schema)
    written = walk(text, random.Random(seed))
    if written is not None:
        # jsonschema takes an id for an address to resolve references against.
        without = {key: value for key, value in schema.items() if key not in ("id", "$id")}
        judge = validator_for(without, default=Draft202012Validator)(without)
        assert judge.is_valid(json.loads(written)), written


def wide(value: dict[str, Any], number: int = MAX_NAMES, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": value for i in range(number)}, **more}


def bounded(number: int) -> dict[str, Any]:
    few = {"type": "number", "exclusiveMinimum": 7 - MAX_BOUND, "exclusiveMaximum": MAX_BOUND - 13}
    return {f"n{i}": {**few, "exclusiveMinimum": few["exclusiveMinimum"] + i} for i in range(number)}


def deep(levels: int, schema: dict[str, Any], word: str) -> dict[str, Any]:
    for _ in range(levels):
        schema = {word: schema} if word != "properties" else {"type": "object", word: {"a": schema}}
    return schema


AT_THE_LIMITS: dict[str, dict[str, Any]] = {
    "optional properties": wide({"type": "string", "maxLength": MAX_LENGTH}),
    "required properties": wide({}, required=[f"p{i}" for i in range(MAX_NAMES)]),
    "closed": wide({"type": "string", "minLength": MAX_LENGTH}, additionalProperties=False),
    "names": {"properties": {"x" * i + "y": {"type": "null"} for i in range(MAX_NAMES)}},
    "long names": {"properties": {"漢" * 200 + str(i): {"type": "null"} for i in range(MAX_NAMES)}},
    "objects": {"properties": {f"o{i}": wide({"type": "null"}, MAX_NAMES - 2) for i in range(4)}},
    "many objects": wide(wide({"type": "null"}, 3), 60),
    "every type": wide({"type": ["string", "integer", "null", "array", "object", "boolean"]}),
    "schemas apart": wide({"anyOf": [{"type": kind} for kind in ("string", "array", "object")]}, 60),
    "bounds": {"type": "object", "properties": bounded(MAX_COSTLY)},
    "formats": wide({"type": "string", "format": "uri"}, MAX_COSTLY),
    "dates": wide({"type": "string", "format": "date-time"}, MAX_COSTLY),
    "choices": {"enum": [f"{i:04x}" * 9 for i in range(MAX_CHOICES)]},
    "choices like another": {"enum": ["a" * i for i in range(1, 170)]},
    "choices in properties": wide({"enum": ["ab", "abc", 1, None]}),
    "arrays": {"type": "array", "minItems": MAX_ITEMS, "items": wide({"type": "array"})},
    "arrays of arrays": {"$defs": {"s": {"type": "string"}}, **deep(30, {"$ref": "#/$defs/s"}, "items")},
    "full arrays": {
        "type": "array",
        "minItems": MAX_ITEMS,
        "items": {"type": "array", "minItems": MAX_ITEMS, "maxItems": MAX_ITEMS, "items": {"maxItems": 63}},
    },
    "additional ones": deep(60, {"type": "integer"}, "additionalProperties"),
    "nested": deep(30, wide({"type": "integer"}), "properties"),
    "definitions": {
        "$defs": {f"d{i}": wide({"$ref": f"#/$defs/d{i + 1}"}, 8) for i in range(26)} | {"d26": {}},
        "$ref": "#/$defs/d0",
    },
}


@pytest.mark.parametrize("name", AT_THE_LIMITS)
def test_schema_at_the_limits_passes_a_trial_that_costs_nothing(name: str) -> None:
    passes(AT_THE_LIMITS[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a"},
        {"type": "string", "format": "html"},
        {"type": "string", "format": "date", "maxLength": 5},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "string", "maxLength": MAX_LENGTH + 1},
        {"type": "string", "maxLength": 5.0},
        {"type": "string", "maxLength": True},
        {"type": "strings"},
        {"type": ["string", "string"]},
        {"type": []},
        {"type": "string", "maximum": 5},
        {"type": "integer", "multipleOf": 3},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "exclusiveMinimum": True},
        {"type": "integer", "maximum": MAX_BOUND + 1},
        {"type": "number", "minimum": 0.5},
        {"type": "number", "minimum": 1, "exclusiveMinimum": 1},
        {"properties": {**bounded(MAX_COSTLY), "d": {"format": "date"}}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "items": [{"type": "string"}]},
        {"type": "array", "items": False},
        {"type": "array", "maxItems": MAX_ITEMS + 1},
        {"properties": {f"p{i}": {} for i in range(MAX_NAMES + 1)}},
        {"required": [f"p{i}" for i in range(MAX_NAMES + 1)]},
        {"required": ["a"], "additionalProperties": False},
        {"required": "a"},
        {"properties": {"a": True}},
        {"patternProperties": {"a": {}}},
        {"minProperties": 1},
        {"enum": []},
        {"const": "\x1f"},
        {"const": "\x7f"},
        {"properties": {"\0": {}}, "required": ["\0"]},
        {"enum": [{}]},
        {"enum": ["a", 1], "type": "string"},
        {"enum": list(range(MAX_CHOICES + 1))},
        {"const": 1.5},
        {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        {"anyOf": [{"type": "string"}, {}]},
        {"anyOf": [{"type": "string"}], "type": "string"},
        {"allOf": [{"type": "string"}]},
        {"not": {"type": "string"}},
        {"if": {}, "then": {}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {}}},
        {"$ref": "#/$defs/b", "$defs": {"a": {}}},
        {"$ref": "#/$defs/a/items", "$defs": {"a": {"items": {}}, "a/items": {}}},
        {"$defs": {"a": {"pattern": "a"}}},
        {"$id": "not an address"},
        {"items": {"$id": "http://a.example/"}},
        {"$schema": "http://a.example/"},
        {"$schema": 4},
        {"items": {"x-guidance": {}}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": ["a"] * MAX_SCHEMAS + ["b"]}}]},
        {"$defs": {f"d{i}": {} for i in range(MAX_SCHEMAS)}},
        {"title": "a" * MAX_CHARS},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_schema_that_needs_a_trial(schema: dict[str, Any]) -> None:
    assert not is_simple(schema, json.dumps(schema))
