"""What a schema's grammar allows fits the schema, as another library judges it."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from support.models.walking import walk

BYTES = LLTokenizer("byte")
WALKS = 4
names = st.sampled_from(["a", "b", "ab", "é", '"', "\n", "/"])
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-20, 20), st.sampled_from(["", "a", "b\n", '"', "é", 1.5, -0.25])
)
strings = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 2),
        "maxLength": st.integers(2, 4),
        "pattern": st.sampled_from(["^a", "b$", "^[ab]*$", "a|é", r"^\d+$", r"^\S", "."]),
        "format": st.sampled_from(["date", "ipv4", "uuid", "time"]),
    },
)
numbers = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={
        "minimum": st.integers(-30, 0),
        "maximum": st.integers(0, 30),
        "exclusiveMinimum": st.integers(-40, -1),
        "exclusiveMaximum": st.integers(1, 40),
        "multipleOf": st.sampled_from([1, 2, 5, 0.5, 0.25]),
    },
)


def larger(schemas: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(names, schemas, max_size=3),
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": st.one_of(st.booleans(), schemas),
            "patternProperties": st.dictionaries(st.sampled_from(["^x", "^y"]), schemas, max_size=2),
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(2, 3),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": schemas,
            "prefixItems": st.lists(schemas, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(2, 3),
        },
    )
    several = st.lists(schemas, min_size=1, max_size=3)
    joined = st.sampled_from(["anyOf", "oneOf", "allOf"]).flatmap(
        lambda word: st.fixed_dictionaries({word: several})
    )
    both = st.tuples(st.one_of(strings, numbers, objects), joined).map(lambda pair: pair[0] | pair[1])
    return st.one_of(objects, arrays, joined, both)


schemas = st.recursive(
    st.one_of(
        strings,
        numbers,
        st.builds(lambda value: {"const": value}, scalars),
        st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=3)),
        st.builds(
            lambda kind: {"type": kind}, st.sampled_from(["null", "boolean", ["string", "null"], "object"])
        ),
        st.booleans(),
        st.just({"$ref": "#/$defs/x"}),
    ),
    larger,
    max_leaves=6,
)


@given(schemas, schemas, st.integers(0, 1 << 30))
def test_what_a_grammar_allows_fits_its_schema(schema: Any, inner: Any, seed: int) -> None:
    whole = {"$defs": {"x": inner}, "allOf": [schema]}
    try:
        grammar = builders.json_schema(whole)
    except GrammarRefused:
        assume(False)
    assume(not LLMatcher(BYTES, grammar, log_level=0).is_error())
    judge = Draft202012Validator(whole)
    chance = random.Random(seed)
    for _ in range(WALKS):
        text = walk(grammar, chance)
        if text is not None:
            try:
                judge.validate(json.loads(text))
            except RecursionError:
                assume(False)  # an x that is x without end: the judge does not follow it
