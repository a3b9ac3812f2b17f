"""The vocabulary that grammars are built over, and the limits that they are built under."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from loraplex.adapters.errors import LoraplexError


class GrammarsUnsupported(LoraplexError):
    """No grammar can be built over this model's tokenizer."""

    code = "grammar_failed"


def load_grammar_tokenizer(model_dir: Path, eos_ids: Collection[int]) -> LLTokenizer:
    """The tokens of `model_dir`/tokenizer.json. `eos_ids` are those that may stand behind a complete answer; ids that
    are no tokens are left out. Takes about a second for 50,000 tokens. Raises GrammarsUnsupported."""
    path = model_dir / "tokenizer.json"
    try:
        text = path.read_text("utf-8")
        fields: dict[str, Any] = json.loads(text)
        if fields.get("truncation") is not None or fields.get("padding") is not None:
            # It would cut the texts that a grammar dictates.
            text = json.dumps({**fields, "truncation": None, "padding": None})
        known = {*fields["model"]["vocab"].values()} if isinstance(fields["model"]["vocab"], dict) else None
        known_added = {token["id"] for token in fields.get("added_tokens") or ()}
        ends = sorted(i for i in eos_ids if known is None or i in known or i in known_added)
        return LLTokenizer(text, eos_token=ends or None)
    except Exception as error:  # a Rust library's
        raise GrammarsUnsupported(f"no grammar can be used with this model's tokenizer: {error}") from error


def parser_limits() -> LLParserLimits:
    """Limits of the matcher of one request. A mask takes 1 ms at most of the grammars that were tried, and about
    4 ms where it uses up both limits of a step; a state of the lexer 2 KB."""
    return LLParserLimits(
        step_lexer_fuel=40_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """The matcher of one grammar's text; `get_error` says what is wrong with it. Runs without the interpreter lock, and
    for some grammars without end: see docs/lab/notes.md."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
