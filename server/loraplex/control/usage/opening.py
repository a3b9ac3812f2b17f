"""A server's own journal at its start, also where the disk is full of journals that earlier servers had not written."""

from __future__ import annotations

from pathlib import Path

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.store.files import has_no_room
from loraplex.control.db.database import Database
from loraplex.control.usage.dead_lives import DeadLives
from loraplex.control.usage.journal import UsageJournal, leftovers
from loraplex.control.usage.ledger import Ledger

log = structlog.get_logger("loraplex")


def open_journal(database: Database, directory: Path, *, capacity: int) -> UsageJournal:
    """Where there is no room for it, the journals of dead servers are written and removed first. Raises OSError."""
    try:
        return UsageJournal(directory, capacity=capacity)
    except OSError as error:
        left = leftovers(directory, "")
        if not has_no_room(error) or not left:
            raise
        log.warning("usage_journal_no_room", reason=error.strerror, leftovers=len(left))
        dead = DeadLives(Ledger(database), directory, "")
        try:
            while dead.write_some():
                pass
        except LoraplexError as reason:
            log.error("usage_left_in_journal", reason=reason.message)
            raise error from reason
        finally:
            dead.forget()
        return UsageJournal(directory, capacity=capacity)
