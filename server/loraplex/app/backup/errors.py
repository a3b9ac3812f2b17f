"""What making a backup raises."""

from __future__ import annotations

from loraplex.adapters.errors import LoraplexError


class BackupFailed(LoraplexError):
    """Nothing of it was kept."""

    code = "backup_failed"


class BackupIncomplete(LoraplexError):
    """What there was to copy was kept; `details` say what is missing, a line each."""

    code = "backup_incomplete"

    def __init__(self, message: str, details: tuple[str, ...]) -> None:
        super().__init__(message)
        self.details = details
