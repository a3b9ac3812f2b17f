"""The ledger's side of the usage journals: rows, how far each journal has been written, and outcomes for guards."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.tables import Usage, UsageSource
from loraplex.control.usage.outcome_inbox import put_outcomes, watched_arms
from loraplex.control.usage.records import Accepted, Ended
from loraplex.control.usage.segments import Position

BEGINNING = Position(0, 0)
MAX_ROWS = 500
"""In one statement; SQLite takes 32,766 values."""
_COLUMNS = [name for name in Ended.__struct_fields__ if name != "key_hash"]


class Source:
    """One journal as it is read: `position` is committed; of `open` the ends have not been seen."""

    def __init__(self, directory: Path, lock_file: IO[str] | None) -> None:
        self.directory = directory
        self.lock_file = lock_file
        self.position = BEGINNING
        self.open: dict[str, Accepted] = {}

    def unlock(self) -> None:
        """Leave it to the next process."""
        if self.lock_file is not None:
            self.lock_file.close()


class Ledger:
    """Takes rows exactly once: a batch and the place in its journal where it ends are committed together, and with them
    the outcomes that guards of releases are to read. All raise DatabaseUnavailable, DatabaseBusy, StoreFull.
    `on_written` is called with every batch."""

    def __init__(self, database: Database, on_written: Callable[[int], None] = lambda rows: None) -> None:
        self._database = database
        self._on_written = on_written

    def find(self, source: Source) -> None:
        """How far it has been written."""
        with self._database.read() as session:
            known = session.get(UsageSource, source.directory.name)
            if known is not None:
                source.position = Position(known.segment, known.offset)

    def commit(self, source: Source, rows: Sequence[Ended], after: Position) -> None:
        if rows:
            with self._database.write(ages_caches=False, in_turn=False) as session:
                for start in range(0, len(rows), MAX_ROWS):
                    self._insert(session, rows[start : start + MAX_ROWS])
                self._note(session, source.directory.name, after)
            self._on_written(len(rows))
        source.position = after

    def _insert(self, session: Session, rows: Sequence[Ended]) -> None:
        insert = self._database.insert(Usage).on_conflict_do_nothing()
        values = [{name: getattr(row, name) for name in _COLUMNS} for row in rows]
        arms = watched_arms(session, ((row.tenant_id, row.adapter) for row in rows if row.key_hash))
        if not arms:
            session.execute(insert, values)
            return
        # A guard may have counted, and removed, the outcome of a row that is there already.
        new = set(session.scalars(insert.returning(Usage.id), values))
        put_outcomes(self._database, session, [row for row in rows if row.id in new], arms)

    def _note(self, session: Session, life: str, after: Position) -> None:
        known = session.scalars(select(UsageSource).where(UsageSource.life == life)).one_or_none()
        if known is None:
            known = UsageSource(life=life)
            session.add(known)
        known.segment, known.offset, known.updated_at = after.segment, after.offset, utc_now()

    def remove(self, source: Source) -> None:
        """Its folder, once the ledger has all of it. Raises OSError."""
        if source.directory.is_dir():  # else it went before, and the database did not hear
            shutil.rmtree(source.directory)
        source.unlock()
        with self._database.write(ages_caches=False, in_turn=False) as session:
            session.execute(delete(UsageSource).where(UsageSource.life == source.directory.name))
