"""From the usage journals to the database, in batches, exactly once.

A batch's rows and the place in the journal where it ends are committed together. A retry after a commit without
an answer writes nothing twice: rows that are there are skipped by their ids.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database
from loraplex.control.usage.dead_lives import DeadLives
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.ledger import Ledger, Source
from loraplex.control.usage.records import Ended
from loraplex.control.usage.segments import read_records

EVERY_S = 0.75
"""Rows are collected for so long: a commit costs as much processor time as dozens of rows, and that time is taken from
the engine's steps. They are in the database within a second (docs/usage.md)."""
RETRY_S = 2.0
TURN_S = 60.0
"""After so long a segment that the database has is left, so that it can go."""
log = structlog.get_logger("loraplex")


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
        self._journal = journal
        self._clock = clock
        self._own = Source(journal.directory, None)
        self._ledger = Ledger(database, lambda rows: self.on_written(rows))
        self._dead = DeadLives(self._ledger, directory, journal.life)
        self._lock = threading.Lock()
        self._caught_up_at = clock()
        self.num_written = 0
        """Rows of this life's requests that the database has."""
        self.on_written: Callable[[int], None] = lambda rows: None
        """Called with every batch, of this life or one before it."""

    @property
    def num_waiting(self) -> int:
        """Rows of this life that the database has not."""
        return max(0, self._journal.num_ended - self.num_written)

    @property
    def lag_s(self) -> float:
        """How long there has been something that the database has not."""
        return self._clock() - self._caught_up_at if self.num_waiting or self._dead.is_left else 0.0

    def write_some(self) -> bool:
        """One batch at most; whether another was left when this one was read. Raises DatabaseUnavailable and the like,
        OSError: then nothing is lost, and the next call begins where this one did."""
        with self._lock:
            if self._dead.write_some() or self._own_batch():
                return True
            self._caught_up_at = self._clock()
            return False

    async def run(self) -> None:
        """Until cancelled; what is there by then is written once more, if the database answers."""
        try:
            while True:
                more = await self._try()
                await asyncio.sleep(0 if more else EVERY_S)
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
                    self._ledger.remove(self._own)
            except (LoraplexError, OSError) as error:
                log.warning("usage_left_in_journal", rows=self.num_waiting, reason=str(error))
            self.forget()

    def forget(self) -> None:
        """Leave the journals of dead lives to the next process."""
        self._dead.forget()

    # This life's.

    def _own_batch(self) -> bool:
        upto = self._journal.synced
        records, after = read_records(self._own.directory, self._own.position, upto)
        if after is not None:
            ended = [record for record in records if isinstance(record, Ended)]
            self._ledger.commit(self._own, ended, after)
            self.num_written += len(ended)
        self._journal.release(after or upto)
        if after is not None and after < upto:
            return True
        self._journal.turn(TURN_S)
        return False
