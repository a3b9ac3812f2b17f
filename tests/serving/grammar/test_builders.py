"""Grammars from what clients send, judged by the library that runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from support.models.matching import takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_schema_takes_what_fits_and_nothing_else() -> None:
    grammar = builders.json_schema(PERSON)
    assert takes(grammar, '{"name":"Ada","age":36}')
    assert takes(grammar, '{\n  "name": "Ada",\n  "age": 36\n}')
    assert not takes(grammar, '{"name":"Ada"}')
    assert not takes(grammar, '{"name":"Ada","age":-1}')
    assert not takes(grammar, '{"name":"Ada","age":36,"x":1}')


@pytest.mark.parametrize("space", [" " * 3, "\n" * 2, "\n" + " " * 33, "\t", " \n", "\n\n", "\r"])
def test_white_space_in_json_is_bounded(space: str) -> None:
    assert takes(builders.json_schema(PERSON), '{"name": "Ada",\n\t\t"age":  1}')
    assert not takes(builders.json_schema(PERSON), '{"name":' + space + '"Ada","age":1}')
    assert not takes(builders.json_object(), '{"a":' + space + "1}")
    assert not takes(f"start: {builders.json_schema_fragment(PERSON)}", '{"name":' + space + '"Ada","age":1}')


@pytest.mark.parametrize("text", [' {"a":1}', '{"a":1} ', '\n{"a":1}', '{"a":1}\n'])
def test_no_white_space_around_json(text: str) -> None:
    assert not takes(builders.json_object(), text)


def test_compact_json_has_no_white_space() -> None:
    grammar = builders.json_schema(PERSON, compact=True)
    assert takes(grammar, '{"name":"A d a","age":1}')
    assert not takes(grammar, '{"name": "Ada","age":1}')


NAMED = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (NAMED, '{"a": 1, "\\u0061": "x"}'),
        (NAMED, '{"\\u0061": "x"}'),
        ({"patternProperties": {"^b": {"type": "integer"}}}, '{"\\u0062": "x"}'),
        ({"type": "string", "maxLength": 1}, '"\\u0061\\u0062"'),
        ({}, '"\\ud800"'),
    ],
)
def test_no_character_can_be_written_in_two_ways(schema: Any, text: str) -> None:
    assert not takes(builders.json_schema(schema), text)
    assert takes(builders.json_schema(NAMED), '{"a": 1, "b": "\\n\\"\\\\é"}')


def test_json_object_is_an_object() -> None:
    grammar = builders.json_object()
    assert takes(grammar, '{"a": [1, null, {"b": "c"}]}')
    assert not takes(grammar, "[1]")
    assert not takes(grammar, "")


def test_fragment_stands_in_a_lark_rule() -> None:
    schema = {
        "type": "object",
        "properties": {'q}ä"\n\x7f': {"const": '}{ \t\\ "\u2028'}},
        "required": ['q}ä"\n\x7f'],
    }
    grammar = f'start: "<call>" arguments "</call>"\narguments: {builders.json_schema_fragment(schema)}'
    value = json.dumps({'q}ä"\n\x7f': '}{ \t\\ "\u2028'}, ensure_ascii=False)
    assert takes(builders.lark(grammar), f"<call>{value}</call>")
    assert not takes(builders.lark(grammar), "<call>{}</call>")


def test_two_fragments_in_one_grammar_keep_their_schemas() -> None:
    one, two = ({"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab")
    fragments = map(builders.json_schema_fragment, (one, two))
    grammar = 'start: "1" one | "2" two\none: {}\ntwo: {}'.replace("{}", "%s") % tuple(fragments)
    assert takes(grammar, '1{"k": "a"}')
    assert takes(grammar, '2{"k": "b"}')
    assert not takes(grammar, '1{"k": "b"}')


@pytest.mark.parametrize(
    ("pattern", "fits", "not_"),
    [
        (r"\d{3}-\d{4}", "555-1234", "555-12345"),
        ("https?://[a-z/]+", "http://a/b", "http:a"),
        (r"a\/b|c/d", "c/d", "a\\/b"),
        ("x\ny", "x\ny", "xny"),
        ("[/]+", "//", "a"),
        ("(?i)yes|no", "YES", "maybe"),
    ],
)
def test_regex_takes_what_it_matches_as_a_whole(pattern: str, fits: str, not_: str) -> None:
    assert takes(builders.regex(pattern), fits)
    assert not takes(builders.regex(pattern), not_)


@given(st.text(st.sampled_from('ab/\\n\n\r\t[]+*|"{}0,é.^$'), min_size=1, max_size=12))
def test_regex_is_written_as_the_library_writes_it(pattern: str) -> None:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        with pytest.raises(GrammarRefused, match="ends in a backslash"):
            builders.regex(pattern)
        return
    ours = json.loads(builders.regex(pattern))["grammars"][0]["lark_grammar"]
    theirs = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    assert ours == theirs


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=5
    )
)
def test_each_choice_is_taken_whatever_its_characters(choices: list[str]) -> None:
    grammar = builders.choice(choices)
    assert all(takes(grammar, text) for text in choices)
    assert not takes(grammar, "".join(choices) + "!")


def test_lark_is_taken_as_lark_even_where_it_looks_like_json() -> None:
    assert takes(builders.lark('start: "a" | "b"'), "b")
    with pytest.raises(AssertionError, match="expecting rule"):
        takes(builders.lark(builders.json_object()), "{}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('root ::= "a" | "b"', True),
        ('# yes\nroot-rule ::=\n  "a"', True),
        ('start: "a"', False),
        ('start: "root ::= x"', False),
        ("// root ::= x\nstart: /a/", False),
    ],
)
def test_gbnf_is_told_from_lark(text: str, found: bool) -> None:
    assert builders.is_gbnf(text) is found


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: builders.regex(""), "empty pattern"),
        (lambda: builders.regex("a" * 8193), "the pattern has 8193 bytes; at most 8192 are allowed"),
        (lambda: builders.choice([]), "at least one choice"),
        (lambda: builders.choice([""]), "a choice that is not empty"),
        (lambda: builders.choice(list(map(str, range(4097)))), "4097 choices; at most 4096"),
        (lambda: builders.choice(["é" * 20_000, "b" * 40_000]), "bytes; at most 65536 are allowed"),
        (lambda: builders.lark("a" * 65_537), "65537 bytes; at most 65536"),
        (lambda: builders.gbnf("a" * 65_537), "65537 bytes; at most 65536"),
        (lambda: builders.gbnf('root ::= "\\u0041"'), "write the character itself"),
    ],
)
def test_what_is_beyond_the_caps_is_refused_with_both_numbers(build: Any, reason: str) -> None:
    with pytest.raises(GrammarRefused, match=reason):
        build()
