"""Answers that should fit a JSON schema, judged by the `jsonschema` package."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Literal

import jsonschema
from jsonschema.validators import validator_for

Verdict = Literal["valid", "wrong", "not judged"]
RUNAWAY = 40
"""Characters of white space at the end of an answer that was cut: more than stand between two tokens of JSON."""


def verdict(schema: Any, text: str) -> Verdict:
    """Of an answer that came to its end. "not judged": the judge itself gave up."""
    try:
        value = json.loads(text)
    except ValueError:
        return "wrong"
    try:
        judge = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        if judge.is_valid(value) or _fits_as_decimals(schema, text):
            return "valid"
    except Exception:
        return "not judged"
    return "wrong"


def _fits_as_decimals(schema: Any, text: str) -> bool:
    """0.07 is a multiple of 0.01, but not in binary."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    judge = validator_for(exact, default=jsonschema.Draft202012Validator)(exact)
    return bool(judge.is_valid(json.loads(text, parse_float=Decimal)))


def runs_away(text: str) -> bool:
    """Whether an answer that was cut ends in white space that goes on and on, outside of a string."""
    tail = len(text) - len(text.rstrip())
    if tail < RUNAWAY:
        return False
    in_string = escaped = False
    for char in text:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = in_string
        elif char == '"':
            in_string = not in_string
    return not in_string
