"""docs/structured-output.md says which keywords are enforced and which are refused: the library agrees."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher

from loraplex.serving.grammar import builders
from support import markdown

ROWS = [
    (re.findall(r"`([^`]+)`", cells[0]), cells[1])
    for cells in markdown.rows(markdown.read("docs/structured-output.md"), "keywords", "")
]
REFUSED = next(words for words, said in ROWS if said == "refused")
FORMATS = next(re.findall(r"`([^`]+)`", said) for words, said in ROWS if words == ["format"])
VALUES: dict[str, Any] = {
    "type": "object",
    "enum": [1],
    "const": 1,
    "$ref": "#/$defs/a",
    "$dynamicRef": "#a",
    "required": ["a"],
    "uniqueItems": True,
    "pattern": "a",
    "format": "date",
    "multipleOf": 2,
    "dependentRequired": {"a": ["b"]},
    "dependencies": {"a": ["b"]},
    "propertyNames": {"maxLength": 3},
    "dependentSchemas": {"a": {"required": ["b"]}},
    **{
        key: {"type": "integer"}
        for key in ("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")
    },
    **{key: [{"type": "integer"}] for key in ("anyOf", "allOf", "oneOf", "prefixItems")},
    **{key: {"a": {}} for key in ("properties", "patternProperties", "$defs", "definitions")},
    **dict.fromkeys(
        ("minProperties", "minItems", "minLength", "minContains", "minimum", "exclusiveMinimum"), 1
    ),
    **dict.fromkeys(
        ("maxProperties", "maxItems", "maxLength", "maxContains", "maximum", "exclusiveMaximum"), 1
    ),
}


BESIDE: dict[str, Any] = {
    "if": {"then": {"minimum": 1}},
    **{key: {"if": {"minimum": 1}} for key in ("then", "else")},
    **{key: {"contains": {"type": "integer"}} for key in ("minContains", "maxContains")},
}
"""Words without which others restrict nothing."""


def refusal(schema: dict[str, Any]) -> str:
    return str(LLMatcher.validate_grammar(builders.json_schema({"$defs": {"a": {}}, **schema})))


@pytest.mark.parametrize("word", REFUSED)
def test_keyword_that_is_refused(word: str) -> None:
    assert json.dumps(word) in refusal({**BESIDE.get(word, {}), word: VALUES.get(word, {})})


@pytest.mark.parametrize("word", [word for words, said in ROWS if said != "refused" for word in words])
def test_keyword_that_is_enforced(word: str) -> None:
    assert not refusal({word: VALUES.get(word, {})})


@pytest.mark.parametrize("name", FORMATS)
def test_format_that_is_enforced(name: str) -> None:
    assert not refusal({"type": "string", "format": name})
    assert "Unknown format" in refusal({"type": "string", "format": f"{name}x"})
