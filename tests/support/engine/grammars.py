"""Grammars to try, what their answers must look like, and a tiny model whose tokens are bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs

from support.models.byte_tokenizer import EOS_ID, byte_decode, write_byte_tokenizer
from support.models.checkpoints import save_tiny

VOCAB_SIZE = 300
"""Of the model: padded beyond the tokenizer's 260."""


def save_byte_model(out: Path, **overrides: Any) -> Path:
    """A tiny random model that reads and writes bytes, which end with `EOS_ID`."""
    save_tiny(out, {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID, **overrides})
    return write_byte_tokenizer(out)


@dataclass(frozen=True)
class Case:
    """A grammar's text, and whether a complete answer matches it."""

    name: str
    grammar: str
    matches: Callable[[str], bool]


def regex_case(pattern: str) -> Case:
    return Case(
        pattern,
        json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]}),
        lambda text: re.fullmatch(pattern, text) is not None,
    )


def choice_case(*choices: str) -> Case:
    lark = "start: " + " | ".join(json.dumps(choice) for choice in choices)
    return Case(" | ".join(choices), lark, lambda text: text in choices)


def schema_case(schema: dict[str, Any]) -> Case:
    guided = {"x-guidance": {"whitespace_flexible": False}, **schema}
    validator = jsonschema_rs.validator_for(schema)

    def matches(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return Case(json.dumps(schema), json.dumps({"grammars": [{"json_schema": guided}]}), matches)


CASES = (
    regex_case("(ab|cd){1,4}"),
    regex_case("[0-9]{2}:[0-5][0-9]"),
    regex_case("x+y?"),
    choice_case("yes", "no", "maybe"),
    choice_case("<|end|>", "a<|start|>b"),  # text that is spelled like special tokens
    schema_case({"type": "boolean"}),
    schema_case({"enum": ["red", "green", 7, None, {"a": [1, "<|pad|>"]}]}),
    schema_case(
        {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "minimum": 0, "maximum": 9999},
                "name": {"type": "string", "maxLength": 6, "pattern": "^[a-z ]*$"},
                "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
            },
            "required": ["id", "name"],
            "additionalProperties": False,
        }
    ),
    schema_case({"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3}),
)


def text_of(token_ids: list[int]) -> str:
    """The answer, without the end token."""
    return byte_decode(token_ids)
