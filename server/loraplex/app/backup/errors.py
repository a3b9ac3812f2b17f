"""Errors of a backup and of a restore."""

from __future__ import annotations

from loraplex.adapters.errors import LoraplexError
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import is_bucket


class BackupFailed(LoraplexError):
    """Nothing of it was kept."""

    code = "backup_failed"


class BackupIncomplete(LoraplexError):
    """The rest was copied and kept; `details` name the missing parts, a line each."""

    code = "backup_incomplete"

    def __init__(self, message: str, details: tuple[str, ...]) -> None:
        super().__init__(message)
        self.details = details


class BackupRefused(LoraplexError):
    """The backup is not whole, or does not fit this installation. Nothing was written."""

    code = "backup_refused"


class RestoreFailed(LoraplexError):
    """A restore could not begin, or did not end; the message says which, and what to do."""

    code = "restore_failed"


def refuse_bucket(settings: Settings) -> None:
    """Raises BackupRefused, SettingsInvalid."""
    if is_bucket(settings):
        raise BackupRefused(
            "the artifacts of this installation are in a bucket, which backup and restore do not copy: keep versions "
            "of the bucket's objects, and back up the database with its own tools."
        )
