"""Usage that dead servers had not written to the database: their journals are read to the end, written, and removed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from loraplex.control.usage.journal import leftovers, lock_life
from loraplex.control.usage.ledger import BEGINNING, MAX_ROWS, Ledger, Source
from loraplex.control.usage.records import Accepted, Ended, Record
from loraplex.control.usage.segments import Position, read_records, trim_segments

_UNREADABLE = (OSError, msgspec.MsgspecError)
"""Errors of a journal with a failed disk, or with records of an unknown version."""
log = structlog.get_logger("loraplex")


class DeadLives:
    """Journals of earlier lives: all in `directory` except that of `life`. `write_some` runs in one thread at a
    time."""

    def __init__(self, ledger: Ledger, directory: Path, life: str) -> None:
        self._ledger = ledger
        self._directory = directory
        self._life = life
        self._left: list[Source] | None = None

    @property
    def is_left(self) -> bool:
        """Whether some are known that are not written completely."""
        return bool(self._left)

    def write_some(self) -> bool:
        """One batch at most; whether there may be more. Raises as `Ledger` does: then nothing is lost, and the next
        call begins where this one did."""
        if self._left is None:
            self._left = self._adopt()
        if not self._left:
            return False
        if not self._told(self._left[0]):
            del self._left[0]
        return True

    def forget(self) -> None:
        """Leave them to the next process."""
        for source in self._left or ():
            source.unlock()
        self._left = None

    def _adopt(self) -> list[Source]:
        found: list[Source] = []
        try:
            for directory in leftovers(self._directory, self._life):
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

    def _take_over(self, directory: Path) -> Source | None:
        """A dead life's journal, to be read from where the database has it; None for one that lives, or that can't be
        read."""
        try:
            source = Source(directory, lock_life(directory))
        except BlockingIOError:
            return None
        except OSError as error:
            _set_aside(directory, error)
            return None
        try:
            self._ledger.find(source)
            self._read_before(source)
        except _UNREADABLE as error:
            source.unlock()
            _set_aside(directory, error)
            return None
        except BaseException:
            source.unlock()
            raise
        return source

    def _told(self, source: Source) -> bool:
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

    def _read_before(self, source: Source) -> None:
        """Requests in progress where the database's part of the journal ends."""
        position: Position | None = BEGINNING
        while position is not None and position < source.position:
            records, position = read_records(source.directory, position, source.position)
            self._follow(source, records)

    def _read_on(self, source: Source) -> bool:
        records, after = read_records(source.directory, source.position)
        if after is None:
            return False
        ended = [record for record in records if isinstance(record, Ended)]
        self._ledger.commit(source, ended, after)
        self._follow(source, records)
        return True

    @staticmethod
    def _follow(source: Source, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Accepted):
                source.open[record.id] = record
            else:
                source.open.pop(record.id, None)

    def _bury(self, source: Source) -> None:
        """Its journal has been read: what it had accepted and not ended ended with it."""
        lost = [record.interrupted() for record in source.open.values()]
        for start in range(0, len(lost), MAX_ROWS):
            self._ledger.commit(source, lost[start : start + MAX_ROWS], source.position)
        self._ledger.remove(source)
        if lost:
            log.warning("usage_interrupted", requests=len(lost))


def trim_leftovers(directory: Path) -> None:
    """Give back what journals of dead servers hold of the disk and never wrote. Needs no room."""
    freed = 0
    for left in leftovers(directory, ""):
        try:
            with lock_life(left):
                freed += trim_segments(left)
        except OSError as error:  # it lives, or cannot be read, which is reported when it is to be written
            log.debug("usage_journal_not_trimmed", folder=str(left), reason=str(error))
    if freed:
        log.info("usage_journals_trimmed", bytes=freed)


def _set_aside(directory: Path, error: Exception) -> None:
    """Leave a journal as it is; the next start tries it again."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    log.error("usage_journal_unreadable", folder=str(directory), reason=reason)
