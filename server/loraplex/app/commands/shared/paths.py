"""A user's argument as one segment of a URL's path."""

from __future__ import annotations

from urllib.parse import quote

from loraplex.app.commands.shared.errors import CommandFailed


def segment(given: str) -> str:
    """`given`, quoted. Raises CommandFailed for what would be another path."""
    if given in ("", ".", ".."):
        raise CommandFailed(f"'{given}' is no name.")
    if "/" in given:
        raise CommandFailed(f"'{given}' is no name: it has a '/'.")
    return quote(given, safe="")
