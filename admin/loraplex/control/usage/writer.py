"""From the usage journals to the database, in batches, exactly once.

A batch's rows and the place in the journal where it ends are committed together. Who asks again after a commit of
which nothing was heard writes nothing twice: rows that are there are passed over by their ids.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec
import structlog
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.adapters.errors import LoraplexError
from loraplex.control.database import Database, utc_now
from loraplex.control.tables import Usage, UsageSource
from loraplex.control.usage.journal import UsageJournal, leftovers, lock_life
from loraplex.control.usage.records import Accepted, Ended, Record
from loraplex.control.usage.segments import Position, read_records

BEGINNING = Position(0, 0)
POLL_S = 0.25
RETRY_S = 2.0
MAX_ROWS = 500
"""In one statement; SQLite takes 32,766 values."""
TURN_S = 60.0
"""After so long a segment that the database has is left, so that it can go."""
_UNREADABLE = (OSError, msgspec.MsgspecError)
"""What a journal raises whose disk fails, or that a version has written whose records this one does not know."""
log = structlog.get_logger("loraplex")


class _Source:
    """One journal as it is read: `position` is committed; of `open` the ends have not been seen."""

    def __init__(self, directory: Path, lock_file: IO[str] | None) -> None:
        self.directory = directory
        self.lock_file = lock_file
        self.position = BEGINNING
        self.open: dict[str, Accepted] = {}

    def unlock(self) -> None:
        """Leave it to whoever comes next."""
        if self.lock_file is not None:
            self.lock_file.close()


class UsageWriter:
    """Moves what `journal` and the lives before it hold. `write_some` runs in one thread at a time. `clock` is
    monotonic seconds."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        journal: UsageJournal,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._directory = directory
        self._journal = journal
        self._clock = clock
        self._own = _Source(journal.directory, None)
        self._left: list[_Source] | None = None
        self._lock = threading.Lock()
        self._caught_up_at = clock()
        self.num_written = 0
        """Rows of this life's requests that the database has."""
        self.on_written: Callable[[int], None] = lambda rows: None
        """Told of every batch, of this life or one before it."""

    @property
    def num_waiting(self) -> int:
        """Rows of this life that the database has not."""
        return max(0, self._journal.num_ended - self.num_written)

    @property
    def lag_s(self) -> float:
        """How long there has been something that the database has not."""
        return self._clock() - self._caught_up_at if self.num_waiting or self._left else 0.0

    def write_some(self) -> bool:
        """One batch at most; whether there may be more. Raises DatabaseUnavailable and the like, OSError: then nothing
        is lost, and the next call begins where this one did."""
        with self._lock:
            if self._left is None:
                self._left = self._adopt()
            if self._left:
                if not self._told(self._left[0]):
                    del self._left[0]
                return True
            if self._own_batch():
                return True
            self._caught_up_at = self._clock()
            return False

    async def run(self) -> None:
        """Until cancelled; what is there by then is written once more, if the database answers."""
        try:
            while True:
                more = await self._try()
                await asyncio.sleep(0 if more else POLL_S)
        finally:
            await asyncio.shield(self._drain())

    async def _try(self) -> bool:
        try:
            return await self._database.run(self.write_some)
        except LoraplexError as error:
            log.debug("usage_waits", rows=self.num_waiting, reason=error.message)
        except Exception as error:
            log.error("usage_not_written", rows=self.num_waiting, exc_info=error)
        await asyncio.sleep(RETRY_S)
        return False

    async def _drain(self) -> None:
        try:
            while await self._database.run(self.write_some):
                pass
        except Exception as error:
            log.warning("usage_left_in_journal", rows=self.num_waiting, reason=str(error))

    def close(self) -> None:
        """After the journal was closed: removes its folder if the database has all of it."""
        with self._lock:
            try:
                while self._own_batch():
                    pass
                if not self._journal.num_open:
                    self._remove(self._own)
            except (LoraplexError, OSError) as error:
                log.warning("usage_left_in_journal", rows=self.num_waiting, reason=str(error))
            self.forget()

    def forget(self) -> None:
        """Leave the journals of dead lives to whoever comes next."""
        for source in self._left or ():
            source.unlock()
        self._left = None

    # This life's.

    def _own_batch(self) -> bool:
        upto = self._journal.synced
        records, after = read_records(self._own.directory, self._own.position, upto)
        if after is None:
            self._journal.release(upto)
            self._journal.turn(TURN_S)
            return False
        ended = [record for record in records if isinstance(record, Ended)]
        self._commit(self._own, ended, after)
        self.num_written += len(ended)
        self._journal.release(after)
        return True

    # Those of lives before it.

    def _adopt(self) -> list[_Source]:
        found: list[_Source] = []
        try:
            for directory in leftovers(self._directory, self._journal.life):
                source = self._take_over(directory)
                if source is not None:
                    found.append(source)
        except BaseException:
            for source in found:
                source.unlock()
            raise
        if found:
            log.info("usage_journals_adopted", lives=len(found))
        return found

    def _take_over(self, directory: Path) -> _Source | None:
        """A dead life's journal, to be read from where the database has it; None for one that lives, or that can't be
        read."""
        try:
            source = _Source(directory, lock_life(directory))
        except BlockingIOError:
            return None
        except OSError as error:
            _set_aside(directory, error)
            return None
        try:
            with self._database.read() as session:
                known = session.get(UsageSource, directory.name)
                if known is not None:
                    source.position = Position(known.segment, known.offset)
            self._read_before(source)
        except _UNREADABLE as error:
            source.unlock()
            _set_aside(directory, error)
            return None
        except BaseException:
            source.unlock()
            raise
        return source

    def _told(self, source: _Source) -> bool:
        """Read on in a dead life's journal; whether there may be more. One that can't be read keeps nothing else
        waiting."""
        try:
            if self._read_on(source):
                return True
            self._bury(source)
        except _UNREADABLE as error:
            source.unlock()
            _set_aside(source.directory, error)
        return False

    def _read_before(self, source: _Source) -> None:
        """What was under way where the database's part of the journal ends."""
        position: Position | None = BEGINNING
        while position is not None and position < source.position:
            records, position = read_records(source.directory, position, source.position)
            self._follow(source, records)

    def _read_on(self, source: _Source) -> bool:
        records, after = read_records(source.directory, source.position)
        if after is None:
            return False
        ended = [record for record in records if isinstance(record, Ended)]
        self._commit(source, ended, after)
        self._follow(source, records)
        return True

    @staticmethod
    def _follow(source: _Source, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Accepted):
                source.open[record.id] = record
            else:
                source.open.pop(record.id, None)

    def _bury(self, source: _Source) -> None:
        """Its journal has been read: what it had accepted and not ended ended with it."""
        lost = [record.interrupted() for record in source.open.values()]
        for start in range(0, len(lost), MAX_ROWS):
            self._commit(source, lost[start : start + MAX_ROWS], source.position)
        self._remove(source)
        if lost:
            log.warning("usage_interrupted", requests=len(lost))

    def _remove(self, source: _Source) -> None:
        if source.directory.is_dir():  # else it went before, and the database did not hear
            shutil.rmtree(source.directory)
        source.unlock()
        with self._database.write(ages_caches=False, in_turn=False) as session:
            session.execute(delete(UsageSource).where(UsageSource.life == source.directory.name))

    # The database.

    def _commit(self, source: _Source, rows: Sequence[Ended], after: Position) -> None:
        if rows:
            with self._database.write(ages_caches=False, in_turn=False) as session:
                for start in range(0, len(rows), MAX_ROWS):
                    values = [msgspec.structs.asdict(row) for row in rows[start : start + MAX_ROWS]]
                    session.execute(self._database.insert(Usage).on_conflict_do_nothing(), values)
                self._note(session, source.directory.name, after)
            self.on_written(len(rows))
        source.position = after

    def _note(self, session: Session, life: str, after: Position) -> None:
        known = session.scalars(select(UsageSource).where(UsageSource.life == life)).one_or_none()
        if known is None:
            known = UsageSource(life=life)
            session.add(known)
        known.segment, known.offset, known.updated_at = after.segment, after.offset, utc_now()


def _set_aside(directory: Path, error: Exception) -> None:
    """It stays as it is, and is tried again by the next start."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    log.error("usage_journal_unreadable", folder=str(directory), reason=reason)
