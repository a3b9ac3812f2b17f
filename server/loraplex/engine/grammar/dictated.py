"""Text that a grammar dictates: the bytes that must follow, and the tokens that spell them.

llguidance spells all of a dictated text whenever it is asked for its tokens, and again for each mask within it: 0.2 ms
a kilobyte. A step uses 32 tokens of it at most. So a long text is spelled a window at a time, and what a step does not
use is kept for the next one.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

MAX_DICTATED_BYTES = 8 << 10
"""Most bytes that a grammar may dictate at one place. To find it takes up to 1 µs a byte, within one step."""
WINDOW_BYTES = 1 << 10
"""Bytes of a dictated text that are spelled at a time."""


class DictatesTooMuch(Exception):
    """A grammar dictates more at one place than it may."""


def dictated_text(matcher: LLMatcher) -> bytes:
    """The text that must follow, whatever is sampled. Raises DictatesTooMuch."""
    text = b"" if matcher.is_stopped() else matcher.compute_ff_bytes()
    if len(text) > MAX_DICTATED_BYTES:
        raise DictatesTooMuch(
            f"it dictates {len(text)} bytes at one place, and may dictate {MAX_DICTATED_BYTES}; leave long texts that "
            "are known beforehand out of it"
        )
    return text


def spelled(matcher: LLMatcher, tokenizer: LLTokenizer, text: bytes) -> list[int]:
    """The tokens of a dictated text, or of its beginning. What follows may change the spelling of its last bytes: they
    are left out."""
    if len(text) <= WINDOW_BYTES:
        return matcher.compute_ff_tokens() if text else []
    return tokenizer.tokenize_partial(text[:WINDOW_BYTES])[0]
