"""Patterns of schemas, beside characters that an answer cannot hold. The judges are Python's."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from loraplex.serving.errors import GrammarRefused
from loraplex.serving.grammar import builders
from loraplex.serving.grammar.patterns import enforced

BYTES = LLTokenizer("byte")
ASCII = [chr(code) for code in range(128)]
SPELLED = [c for c in ASCII if c in "\b\t\n\f\r" or " " <= c < "\x7f"] + ["é", "\x85", "\u2028", "漢"]
"""What an answer's string can hold."""


def text(value: Any) -> str:
    # JSON may write a character beyond ASCII, or \x7f, as it is.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def taken(schema: dict[str, Any], values: list[Any]) -> list[Any]:
    matcher = LLMatcher(BYTES, builders.json_schema(schema, compact=True), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return [value for value in values if matcher.reset() and follows(matcher, text(value))]


def follows(matcher: LLMatcher, answer: str) -> bool:
    tokens = list(answer.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def fits(schema: dict[str, Any], values: list[Any]) -> list[Any]:
    judge = Draft202012Validator(schema)
    return [value for value in values if judge.is_valid(value)]


@pytest.mark.parametrize(
    "one",
    [
        *(r"[^\x00-\x1f]", r"[^\x00-\x1f\x7f]", r"[^\x00-\x08]", r"[^\u0000-\u001f]", "[^\x00-\x1f]"),
        *(
            '[^"]',
            r"[^\\]",
            r'[^"\\]',
            r'[^"\n]',
            r'[^"\r\n]',
            r'[^"\s]',
            r"[^]\"]",
            "[^-a]",
            "[^a-]",
            r"[^\D\"]",
        ),
        *(r"[\x00-\x1f]", "[\x00-\x1f]", r"[\x00-\x09\x0b-\x1f]", r"[\x00-\x20]", r"[\x07-\x09]", r"[\t-\r]"),
        *(
            r"[ -\x7f]",
            r"[\x1f-\x23]",
            r"[^ -~]",
            r"[a\x01]",
            r"[\x7fb]",
            "[]a]",
            r"[\]\[]",
            r"[a-z\d_-]",
            r"[\s\x00]",
        ),
        *(
            r"(?:[\x00-\x0f]|[\x10-\x1f])",
            r'(?:[^"\s]|\s)',
            r"(?:[^\n]|\n)",
            r"(?:[\x01]?a)",
            r"(?P<a_1>[^\"])",
        ),
        *(
            r"\s",
            r"\S",
            r"\d",
            ".",
            r"\t",
            r"\n",
            r"\r",
            r"\f",
            "\t",
            "\n",
            "\r",
            "\b",
            "\f",
            r"\x08",
            r"\u000c",
        ),
        *(r"\x22", '"', r"\\", r"\x5c", r"\[", r"\]", "]"),
    ],
    ids=ascii,
)
def test_one_character_is_taken_where_the_pattern_finds_it(one: str) -> None:
    schema = {"type": "string", "pattern": f"^{one}$"}
    assert taken(schema, SPELLED) == fits(schema, SPELLED)
    assert taken(schema, ASCII) == taken(schema, SPELLED[:-4])
    between = {"type": "string", "pattern": f"^a{one}b$"}
    values = [f"a{c}b" for c in SPELLED] + ["ab"]
    assert taken(between, values) == fits(between, values)


def test_names_of_properties_fit_their_pattern() -> None:
    schema = {
        "type": "object",
        "patternProperties": {r'^[^"\\]$': {"const": 1}},
        "additionalProperties": {"const": 2},
        "minProperties": 1,
    }
    values = [{c: number} for c in SPELLED for number in (1, 2)]
    assert taken(schema, values) == fits(schema, values)


@pytest.mark.parametrize(
    "pattern",
    [
        *("\x01", "^a\x01b$", r"\x01", r"\x1F", r"\u0001", r"\U0000001b", r"\x{1}", r"\u{0}", r"\U{007f}"),
        *(
            r"\a",
            r"\v",
            "\x0b",
            "\x7f",
            r"a\x7Fb",
            "\0",
            "(a|\x1b)",
            "[a]\x01",
            "[^]]\\v",
            "\\\\\x01",
            "[[a]b]\x01",
        ),
        *(r"(?P<n[>\x01)", r"\p{L}\x01", r"(?i)\x01", r"\[\x01\]"),
    ],
    ids=ascii,
)
def test_literal_that_no_answer_can_hold_is_refused_at_its_place(pattern: str) -> None:
    for place, schema in (
        ("items.pattern", {"items": {"pattern": pattern}}),
        (f"patternProperties.{pattern}", {"patternProperties": {pattern: {}}}),
    ):
        with pytest.raises(GrammarRefused, match=r"only .* could write") as caught:
            builders.json_schema(schema)
        assert caught.value.path == place


@pytest.mark.parametrize(
    "pattern", [r"^a[\x01]b$", r"[\x00-\x07]", r"[\x7f]", "[[:cntrl:]&&[\0]]"], ids=ascii
)
def test_set_that_no_answer_can_hold_takes_nothing(pattern: str) -> None:
    matcher = LLMatcher(BYTES, builders.json_schema({"type": "string", "pattern": pattern}), log_level=0)
    assert "Unsatisfiable" in matcher.get_error()


def test_properties_of_unicode_do_not_add_quotes() -> None:
    for pattern in (r"^\P{P}$", r"^[^\p{P}]$", r"^\p{Cc}$", "^[[:cntrl:]]$"):
        schema = {"type": "string", "pattern": pattern}
        assert "\n" in taken(schema, SPELLED)
        assert not taken(schema, ['"', "\\"])


def test_comments_in_patterns_are_refused() -> None:
    with pytest.raises(ValueError, match="flag 'x'"):
        enforced("(?ix) # [\n\x01")
    assert enforced("(?i)x") == "(?i)x"


@pytest.mark.parametrize("schema", [{"const": {"pattern": "[^a]"}}, {"properties": {"pattern": {}}}])
def test_what_is_no_pattern_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert text(schema)[1:] in builders.json_schema(schema)


@pytest.mark.parametrize("part", ["(?<", r"\p{", "[", r"\x{1", "[^", "(?", "]", r"\\", "[a]", "(?P<"])
def test_long_patterns_are_read_in_linear_time(part: str) -> None:
    def seconds(size: int) -> float:
        began = time.process_time()
        enforced(part * (size // len(part)))
        return time.process_time() - began

    # The least of three: one may have to collect what other tests have left.
    short, long = (min(seconds(size) for _ in range(3)) for size in (8_000, 64_000))
    assert long < max(0.05, 24 * short)


members = st.sampled_from(
    ["a", '"', r"\\", r"\n", "\t", "^", r"\x00", r"\x01-\x1f", "!-~", r"\s", r"\S", r"\]"]
)
sets = st.builds(
    lambda first, inner: first + "".join(inner) + "]",
    st.sampled_from(["[", "[^"]),
    st.lists(members, min_size=1, max_size=4),
)
atoms = st.one_of(
    sets, sets, st.sampled_from(["a", '"', r"\\", r"\n", "\t", ".", "|", r"\s", r"\S", "?", "()"])
)


@given(st.lists(atoms, min_size=1, max_size=4).map("".join))
def test_small_patterns_take_what_python_finds(inner: str) -> None:
    schema = {"type": "string", "pattern": f"^(?:{inner})$"}
    values = [*SPELLED, "", "ab", 'a"', "\\\\", '"\n', "a\\", "\n\n"]
    try:
        judge = re.compile(f"^(?:{inner})\\Z")
    except re.error:
        assume(False)
    found = [value for value in values if judge.search(value)]
    reason = LLMatcher(BYTES, builders.json_schema(schema, compact=True), log_level=0).get_error()
    if "Unsatisfiable" in reason:
        assert not found
    elif not reason:
        assert taken(schema, values) == found
