"""The usage journal of one life of a server: usage that is not in the database yet, on the local disk.

A request is written here when it is accepted and when it has ended. The second record is on the disk before the last
byte of the answer goes out: the row of every answer that a client saw to its end is kept, whatever happens to this
process or to the machine. One thread writes: all that has come while it wrote goes with the next sync, so that a sync
is shared by however many requests end at a time, and the event loop waits for no disk.

A life has a folder of its own, locked while it lasts. No life appends to another's: what a dead one left is read,
written to the database to the database, and removed (see `writer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import structlog

from loraplex.control.background import TaskState
from loraplex.control.errors import ControlError
from loraplex.control.usage.records import MAX_RECORD_BYTES, Accepted, Ended, encode
from loraplex.control.usage.segments import (
    SEGMENT_BYTES,
    Position,
    Segment,
    segment_numbers,
    segment_path,
    sync_directory,
)

DEFAULT_CAPACITY = 256 << 20
SYNC_WAIT_S = 2.0
"""The longest wait of an answer's end for its record's sync. Then a disk hangs; the system has the record, and keeps it
through the death of this process."""
RETRY_S = 0.5
LOCK = "lock"
log = structlog.get_logger("loraplex")


class JournalFull(ControlError):
    """No more usage can be kept until the database has taken some, or the disk has room: nothing is served that could
    not be accounted for."""

    code = "server_overloaded"
    retry_after_s = 10.0

    def __init__(self) -> None:
        super().__init__("The server can't record usage at the moment. Please try again later.")


@dataclass(slots=True)
class _Open:
    """A request under way: its first record, and the segment that has it (None: it is on its way there)."""

    record: bytes
    segment: int | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    record: bytes
    opened: _Open | None = None
    done: Callable[[], None] | None = None


class UsageJournal:
    """`accept`, `end` for requests, on the event loop; `synced` and `release` for the writer, on any thread.

    `capacity` bounds the folder, in bytes; `directory` is where lives have their folders. Raises OSError where it can't
    be made.
    """

    def __init__(
        self, directory: Path, *, capacity: int = DEFAULT_CAPACITY, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.life = uuid.uuid4().hex
        self.directory = directory / self.life
        self._capacity = capacity
        self._segment_bytes = segment_bytes
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.mkdir(mode=0o700)
        try:
            self._lock_file = lock_life(self.directory)
            sync_directory(directory)
            self._current = Segment(self.directory, 1, segment_bytes)
        except OSError as error:
            # Else each try to start on a full disk would leave a folder.
            shutil.rmtree(self.directory, ignore_errors=True)
            error.filename = error.filename or str(
                directory
            )  # a write names no file, and the start says why it fails
            raise
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: list[_Item] = []
        self._queued_bytes = 0
        self._open: dict[str, _Open] = {}
        self._began = time.monotonic()
        self._spare: Segment | None = None
        self._numbers = [1]
        self._synced = Position(1, 0)
        self._num_ended = 0
        self._writing = False
        self._failure: str | None = None
        self._no_room: str | None = None
        self._spare_not_before = 0.0
        self._closing = False
        self._dead = False
        self._in_hand: list[_Item] = []
        self.state = TaskState("usage-journal", up=True)
        """The thread's state, as the metrics show it."""
        self._thread = threading.Thread(target=self._run, name="usage-journal", daemon=True)
        self._thread.start()

    # Requests.

    def accept(self, record: Accepted) -> None:
        """From here on `end` is owed. Raises JournalFull; what is accepted always has room for its end."""
        opened = _Open(encode(record))
        with self._wake:
            if self._closing or not self._has_room():
                raise JournalFull
            self._open[record.id] = opened
            self._put(_Item(opened.record, opened))

    async def end(self, record: Ended) -> None:
        """Returns when the record is on the disk, or after `SYNC_WAIT_S`. Never raises for the disk's sake."""
        loop = asyncio.get_running_loop()
        synced = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop has no waiter left
                loop.call_soon_threadsafe(synced.set)

        with self._wake:
            self._open.pop(record.id, None)
            self._put(_Item(encode(record), done=tell))
            if self._dead:
                return  # which is in the log, and no request is accepted any more
        try:
            async with asyncio.timeout(SYNC_WAIT_S):
                await synced.wait()
        except TimeoutError:
            log.warning("usage_sync_slow", id=record.id, waited_s=SYNC_WAIT_S)

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        self._queued_bytes += len(item.record)
        self._wake.notify()

    # The writer.

    @property
    def synced(self) -> Position:
        """The ends before it are on the disk."""
        return self._synced

    @property
    def num_ended(self) -> int:
        """Ends that are on the disk, since the life began."""
        return self._num_ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_bytes(self) -> int:
        """On the disk."""
        return len(self._numbers) * self._segment_bytes

    @property
    def full(self) -> bool:
        """Whether `accept` would raise."""
        with self._lock:
            return not self._has_room()

    def failure(self) -> str | None:
        """Why no request can be taken, and none will be able to be in a moment; None while they can. One sentence's
        end, for the probes."""
        with self._lock:
            if self._failure is not None:
                return f"usage cannot be recorded ({self._failure})"
            if self._has_room() or (self._no_room is None and self._wants_spare()):
                return None
            reason = self._no_room or "the database has to take some of it first"
            return f"usage cannot be recorded: the journal is full ({reason})"

    def _has_room(self) -> bool:
        """Whether there is room for one more request and its end, beside all that is owed. Call with the lock held."""
        room = self._current.room + (0 if self._spare is None else self._segment_bytes)
        owed = self._queued_bytes + (len(self._open) + 2) * MAX_RECORD_BYTES
        return self._failure is None and owed <= room

    def turn(self, min_age_s: float) -> None:
        """Begin another segment if the current one has records and is so old: the next `release` can remove it."""
        with self._wake:
            old = time.monotonic() - self._began >= min_age_s
            if old and self._current.used and self._spare is not None and not self._writing:
                self._turn()
                self._wake.notify()

    def release(self, told: Position) -> None:
        """The database has everything before `told`: remove the segments that end before it. Of a request that is
        still under way the first record is written again, and its segment stays until that is on the disk."""
        with self._wake:
            held = False
            for number in [number for number in self._numbers if number < told.segment]:
                for opened in self._open.values():
                    held = held or opened.segment is None
                    if opened.segment == number:
                        opened.segment, held = None, True
                        self._put(_Item(opened.record, opened))
                if held:
                    return
                segment_path(self.directory, number).unlink(missing_ok=True)
                self._numbers.remove(number)
            self._wake.notify()  # there may be room for a spare now

    def close(self) -> None:
        """Write what has come, and end. The folder stays, and is unlocked."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._current.close()
        if self._spare is not None:
            self._spare.close()
        self._lock_file.close()

    # The thread.

    def _run(self) -> None:
        """Write until the server ends, and try again what fails: what was taken from the queue is kept until it is
        on the disk. Should the thread end all the same, no request is accepted any more."""
        try:
            self._work()
        except BaseException as error:
            self._fail(f"its thread ended: {_reason(error)}", error)
            with self._lock:
                self._dead = True
                left, self._queue = self._in_hand + self._queue, []
            for item in left:
                if item.done is not None:
                    item.done()
        self.state.up = False

    def _work(self) -> None:
        while True:
            self._provide_spare()
            with self._wake:
                if not self._queue and not self._closing:
                    self._wake.wait(RETRY_S if self._wants_spare() else None)
                self._in_hand, self._queue = self._queue, []
                self._writing = bool(self._in_hand)
                if not self._in_hand and self._closing:
                    return
            if self._in_hand:
                self._write(self._in_hand)

    def _fail(self, reason: str, error: BaseException) -> None:
        if reason != self._failure:  # it is tried again every RETRY_S, for hours perhaps
            unforeseen = None if isinstance(error, OSError) else error
            log.error("usage_journal_failed", reason=reason, exc_info=unforeseen)
        with self._lock:
            self._failure = reason
        self.state.up = False

    def _write(self, batch: list[_Item]) -> None:
        """Until the batch is on the disk, whatever fails. After a failed sync the file's content is unknown: then all
        of it is written again, into another segment if there is one, and what is there twice is written to the database
        once."""
        while True:
            segment, used = self._current, self._current.used
            try:
                self._append(batch)
                break
            except Exception as error:
                failure = error
                self._fail(_reason(error), error)
                if self._closing:
                    return
                if self._current is segment:
                    segment.used = used
                time.sleep(RETRY_S)
                self.state.restarts += 1
                self._provide_spare()
                with self._lock:
                    if self._spare is not None and isinstance(failure, OSError):
                        self._turn()
        if self._failure is not None:
            log.info("usage_journal_recovered")
        self.state.up = True
        with self._lock:
            self._failure, self._writing = None, False
            self._queued_bytes -= sum(len(item.record) for item in batch)
            self._num_ended += sum(item.done is not None for item in batch)
            self._synced = Position(self._current.number, self._current.used)
        for item in batch:
            if item.done is not None:
                item.done()

    def _append(self, batch: list[_Item]) -> None:
        data = bytearray()
        for item in batch:
            if len(data) + len(item.record) > self._current.room:
                self._current.append(data)
                self._current.sync()
                data = bytearray()
                if self._spare is None:
                    self._provide_spare()
                if self._spare is None:
                    raise OSError(28, "there is no room for another segment")
                with self._lock:
                    self._turn()
            data += item.record
            if item.opened is not None:
                item.opened.segment = self._current.number
        self._current.append(data)
        # The death of this process takes nothing from the system. Records without a waiter go with the next sync.
        if any(item.opened is None for item in batch):
            self._current.sync()

    def _turn(self) -> None:
        """To the spare; its place is taken later. Call with the lock held."""
        assert self._spare is not None
        self._current.close()
        self._current, self._spare = self._spare, None
        self._numbers.append(self._current.number)
        self._began = time.monotonic()
        self._synced = Position(self._current.number, 0)

    def _wants_spare(self) -> bool:
        return self._spare is None and (len(self._numbers) + 1) * self._segment_bytes <= self._capacity

    def _provide_spare(self) -> None:
        """After a failure not before `RETRY_S`: each try may write all that is left of the disk."""
        if not self._wants_spare() or time.monotonic() < self._spare_not_before:
            return
        try:
            spare = Segment(self.directory, self._numbers[-1] + 1, self._segment_bytes)
        except Exception as error:
            self._spare_not_before = time.monotonic() + RETRY_S
            reason = _reason(error)
            if reason != self._no_room:
                unforeseen = None if isinstance(error, OSError) else error
                log.error("usage_journal_no_room", reason=reason, exc_info=unforeseen)
            self._no_room = reason
            return
        if self._no_room is not None:
            log.info("usage_journal_recovered")
        with self._lock:
            self._spare, self._no_room = spare, None


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def lock_life(directory: Path) -> IO[str]:
    """A life's own mark, held while the file is open. Raises BlockingIOError where another process holds it,
    OSError."""
    file = open(directory / LOCK, "w")  # noqa: SIM115 - held as long as the life lasts
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def leftovers(directory: Path, but: str) -> list[Path]:
    """The folders of lives other than `but`."""
    if not directory.is_dir():
        return []
    return sorted(
        path for path in directory.iterdir() if path.is_dir() and path.name != but and segment_numbers(path)
    )
