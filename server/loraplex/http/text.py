"""A client's own words, made safe for logs and messages."""

from __future__ import annotations


def printable(text: str, length: int = 128) -> str:
    """`text`, cut to `length` characters, with a question mark for each one that cannot be printed."""
    return "".join(c if c.isprintable() else "?" for c in text[:length])
