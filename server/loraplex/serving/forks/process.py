"""One life of a process that works in forks, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import socket
from collections.abc import Sequence

import msgspec

from loraplex.engine.ipc.framing import HEADER_BYTES, FrameTooLarge, ProtocolError, encode_frame, frame_length
from loraplex.serving.forks.messages import Job, JobDone, Start, Started
from loraplex.serving.supervision.child import Child

START_TIMEOUT_S = 60.0
KILL_WAIT_S = 5.0
_KEPT = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TZ|TMPDIR|VIRTUAL_ENV|PYTHON\w+|(LD|DYLD)_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|\w+_NUM_THREADS|COV\w+"
)
"""Names of the variables that Python and its libraries need."""


class ProcessFailed(Exception):
    """The process did not start, or was lost meanwhile."""


class ForkProcess:
    """Made by `start`. It never ends by itself: `alive` is False once it was lost. Call from one event loop only."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: str | None
    ) -> None:
        self.error = error
        """Why it cannot do any job."""
        self._child = child
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[JobDone]] = {}
        self.alive = True
        self._reading = asyncio.create_task(self._read(), name="fork-process")

    @classmethod
    async def start(cls, start: Start, command: Sequence[str]) -> ForkProcess:
        """Returns when it has loaded what it needs. Raises ProcessFailed."""
        ours, theirs = socket.socketpair()
        child: Child | None = None
        writer: asyncio.StreamWriter | None = None
        started: Started | None = None
        try:
            with theirs:
                child = Child([*command, str(theirs.fileno())], [theirs.fileno()], bare_environment())
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            writer.write(encode_frame(start))
            async with asyncio.timeout(START_TIMEOUT_S):
                started = msgspec.msgpack.decode(await _next(reader), type=Started)
            return cls(child, reader, writer, started.error)
        except (OSError, EOFError, TimeoutError, ProtocolError, msgspec.MsgspecError) as error:
            raise ProcessFailed("did not start") from error
        finally:
            if started is None:
                ours.close() if writer is None else writer.close()
                if child is not None:
                    await child.kill(KILL_WAIT_S)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def num_waiting(self) -> int:
        """Jobs that it has."""
        return len(self._waiting)

    async def run(self, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        """Raises ProcessFailed where the process is lost meanwhile."""
        if not self.alive:
            raise ProcessFailed("was lost")
        number = next(self._ids)
        try:
            job = encode_frame(Job(number, owner, body, weight))
        except FrameTooLarge:
            return JobDone(number, "too_large")
        answer: asyncio.Future[JobDone] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._writer.write(job)
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the process and its jobs."""
        self.alive = False
        self._reading.cancel()
        self._writer.close()
        await self._child.kill(KILL_WAIT_S)

    async def _read(self) -> None:
        try:
            while True:
                done = msgspec.msgpack.decode(await _next(self._reader), type=JobDone)
                answer = self._waiting.get(done.id)
                if answer is not None and not answer.done():
                    answer.set_result(done)
        except (OSError, EOFError, ProtocolError, msgspec.MsgspecError):
            await self._child.kill(KILL_WAIT_S)
        finally:
            self.alive = False
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ProcessFailed("was lost"))


def bare_environment() -> dict[str, str]:
    """The environment without secrets: a tenant's program that breaks out of its bounds is to find none."""
    return {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}


async def _next(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises EOFError."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        return await reader.readexactly(frame_length(await reader.readexactly(HEADER_BYTES)))
    raise EOFError
