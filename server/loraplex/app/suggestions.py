"""The name that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The words that name the known one that is most like `name`; empty where none is."""
    # The prefix that all have makes none alike.
    by_rest = {other.removeprefix("LORAPLEX_"): other for other in known}
    found = difflib.get_close_matches(name.removeprefix("LORAPLEX_"), by_rest, n=1, cutoff=0.7)
    return f", did you mean '{by_rest[found[0]]}'?" if found else ""
