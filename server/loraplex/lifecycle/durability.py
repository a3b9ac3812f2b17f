"""Pushes that serve before they are durable: how many may wait for the disk, and the task that flushes them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

import structlog

from loraplex.adapters.errors import LoraplexError
from loraplex.control.db.database import Database
from loraplex.control.flushes import Flushes

MAX_WAITING = 64
"""Versions that may wait for the disk at a time; a push beyond them is flushed before its answer."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes of these versions."""
BATCH = 16
"""Versions that one transaction makes durable."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""Bounds of the pause after a failure, which doubles with each one in a row."""
FINISH_S = 10.0
"""The most time that a server's end waits for the last flushes."""
log = structlog.get_logger("loraplex")


PushOutcome = Literal["early", "durable", "known"]
"""The outcome of a push that was taken: answered before it was durable, or when it was, or its series had it."""


class DurabilityWatch(Protocol):
    """Hears of flushes, from any thread."""

    def durable(self, seconds: float) -> None:
        """A version is durable, so long after its push."""

    def flush_failed(self) -> None:
        """The disk or the database kept a version from it; it is tried again."""


@dataclass(slots=True)
class _Waiting:
    num_bytes: int
    since: float
    has_failed: bool = False


class Place:
    """A push's place among the versions that may wait for the disk. `is_free` is False where there is none: then the
    push is flushed before its answer."""

    def __init__(self, durability: Durability | None, num_bytes: int) -> None:
        self.is_free = durability is not None
        self._durability = durability
        self._num_bytes = num_bytes

    def put(self, digest: str) -> None:
        """The push was taken, and its bytes are to be flushed."""
        if self._durability is not None:
            self._durability.put(digest, self._num_bytes)


@contextlib.contextmanager
def no_place() -> Iterator[Place]:
    """The place of an upload that is durable first."""
    yield Place(None, 0)


class Durability:
    """Flushes pushed versions in the background, in the order of their pushes. `place` and `put` are for any thread;
    `run` and `finish` for the event loop."""

    def __init__(
        self,
        database: Database,
        flushes: Flushes,
        watch: DurabilityWatch,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._database = database
        self._flushes = flushes
        self._watch = watch
        self._clock = clock
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._first_pause_s = first_pause_s
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}
        self._taken = 0  # places of pushes that are not decided yet
        self._taken_bytes = 0
        self._round = asyncio.Lock()
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_waiting(self) -> int:
        """Versions that are not durable yet."""
        return len(self._waiting)

    @contextlib.contextmanager
    def place(self, num_bytes: int) -> Iterator[Place]:
        """A place for a push of this size, around the whole of its admission."""
        with self._lock:
            num, total = self._taken + len(self._waiting), self._taken_bytes + self._waiting_bytes()
            is_free = num < self._max_waiting and total + num_bytes <= self._max_waiting_bytes
            if is_free:
                self._taken += 1
                self._taken_bytes += num_bytes
        try:
            yield Place(self if is_free else None, num_bytes)
        finally:
            if is_free:
                with self._lock:
                    self._taken -= 1
                    self._taken_bytes -= num_bytes

    def put(self, digest: str, num_bytes: int) -> None:
        """Have the digest's bytes flushed, and its versions made durable."""
        with self._lock:
            # Also where it waits already: a flush that runs may be of the bytes before these.
            before = self._waiting.get(digest)
            has_failed = before is not None and before.has_failed
            self._waiting[digest] = _Waiting(num_bytes, self._clock(), has_failed)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._arrived.set)

    async def run(self) -> None:
        """Until it is cancelled. Begins with what an earlier life could not flush."""
        self._loop = asyncio.get_running_loop()
        for digest in await self._database.run(self._flushes.waiting):
            self.put(digest, 0)
        pause = self._first_pause_s
        while True:
            self._arrived.clear()
            while self._waiting:
                if await self._flush_some():
                    pause = self._first_pause_s
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), pause)
                self._arrived.clear()
                pause = min(LONGEST_PAUSE_S, pause * 2)
            await self._arrived.wait()

    async def finish(self, timeout_s: float = FINISH_S) -> None:
        """Flush all that waits, before the server ends. What fails is left to the next start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                tries = len(self._waiting) // BATCH + 1  # what fails goes behind the others
                while self._waiting and tries:
                    tries -= not await self._flush_some()
        if self._waiting:
            log.warning("versions_not_durable", num_versions=len(self._waiting))

    async def _flush_some(self) -> bool:
        """Flush those that wait for longest; whether none of them failed."""
        async with self._round:
            with self._lock:
                batch = dict(islice(self._waiting.items(), BATCH))
            suspect = {digest for digest, waited in batch.items() if waited.has_failed}
            try:
                settled = await self._database.run(self._flushes.settle, list(batch), suspect)
            except LoraplexError as error:
                log.warning("version_not_durable", num_versions=len(batch), reason=error.message)
                self._watch.flush_failed()
                return False
            now = self._clock()
            with self._lock:
                for digest, waited in batch.items():
                    if self._waiting[digest] is waited:
                        del self._waiting[digest]
                for digest in settled.failed:  # behind the others
                    self._waiting.setdefault(digest, batch[digest]).has_failed = True
                for digest in settled.replaced:
                    self._waiting.setdefault(digest, batch[digest])
        for digest in settled.durable:
            self._watch.durable(now - batch[digest].since)
        for digest, reason in settled.failed.items():
            log.warning("version_not_durable", digest=digest[:12], reason=reason)
            self._watch.flush_failed()
        return not settled.failed

    def _waiting_bytes(self) -> int:
        return sum(waiting.num_bytes for waiting in self._waiting.values())
