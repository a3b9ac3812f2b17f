"""A client's own words, made safe for logs and messages, and the name that it may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64
"""A longer name is compared with none: the time grows with its square."""


def printable(text: str, length: int = 128) -> str:
    """`text`, cut to `length` characters, with a question mark for each one that cannot be printed."""
    cut = text[:length]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words that name the known one that is most like `name`; empty where none is."""
    if len(name) > _LONGEST:
        return ""
    # The prefix that all have makes none alike.
    by_rest = {other.removeprefix("LORAPLEX_"): other for other in known}
    found = difflib.get_close_matches(name.removeprefix("LORAPLEX_"), by_rest, n=1, cutoff=0.7)
    return f", did you mean '{by_rest[found[0]]}'?" if found else ""
