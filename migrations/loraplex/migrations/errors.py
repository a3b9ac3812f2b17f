"""Errors of migrating."""

from __future__ import annotations

from loraplex.adapters.errors import LoraplexError


class DatabaseTooNew(LoraplexError):
    """A newer version has migrated the database."""

    code = "database_too_new"

    def __init__(self, found: str, known: str) -> None:
        super().__init__(
            f"the database has the schema '{found[:40]}', and this version knows none above '{known}': a newer version "
            "has used it. Install that version, or restore a back-up from before"
        )
