"""Texts that a grammar allows, at random: what a model without any sense would answer."""

from __future__ import annotations

import random

from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 2000
_BYTES = LLTokenizer("byte")
_LIKELY = ((b"]", 0.35), (b"}", 0.35), (b'"', 0.3), (b",", 0.2), (b"\\", 0.1))
"""So that strings and arrays end, and escapes are tried."""


def walk(grammar: str, chance: random.Random) -> str | None:
    """A whole text of the grammar; None where it is too long, or the walk left the matcher's limits."""
    matcher = LLMatcher(_BYTES, grammar, log_level=0)
    text = bytearray()
    while len(text) < MAX_BYTES:
        if matcher.is_error():
            return None
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        if matcher.is_accepting() and (not allowed or chance.random() < 0.5):
            return text.decode()
        if not allowed:
            return None
        byte = next((c[0] for c, often in _LIKELY if c[0] in allowed and chance.random() < often), None)
        if byte is None:
            plain = [byte for byte in allowed if 32 < byte < 127] or allowed
            byte = chance.choice(plain if chance.random() < 0.9 else allowed)
        matcher.consume_token(byte)
        text.append(byte)
    return text.decode() if matcher.is_accepting() else None
