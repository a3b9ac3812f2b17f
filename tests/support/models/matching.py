"""Whether a grammar takes a text, by llguidance itself over bytes."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

_BYTES = LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    """Whether the whole of `text` follows the grammar."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())
