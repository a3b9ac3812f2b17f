"""One life of the process that checks grammars, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
from collections.abc import Sequence

import msgspec

from loraplex.serving.errors import GrammarsUnavailable
from loraplex.serving.grammar.messages import HEADER, Check, Checked, Start, Started, frame
from loraplex.serving.supervision.child import Child

WORKER_COMMAND = (sys.executable, "-m", "loraplex.serving.grammar.worker")
START_TIMEOUT_S = 60.0
KILL_WAIT_S = 5.0


class GrammarProcess:
    """Made by `start`. It never ends by itself: `alive` is False once it was lost. Call from one event loop only."""

    def __init__(
        self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: str | None
    ) -> None:
        self.error = error
        """Why it cannot check any grammar: its library does not take the model's tokenizer."""
        self._child = child
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Checked]] = {}
        self.alive = True
        self._reading = asyncio.create_task(self._read(), name="grammar-process")

    @classmethod
    async def start(cls, start: Start, command: Sequence[str] = WORKER_COMMAND) -> GrammarProcess:
        """Returns when its tokenizer is loaded. Raises GrammarsUnavailable."""
        ours, theirs = socket.socketpair()
        child: Child | None = None
        writer: asyncio.StreamWriter | None = None
        started: Started | None = None
        try:
            with theirs:
                child = Child([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            writer.write(frame(start))
            async with asyncio.timeout(START_TIMEOUT_S):
                started = msgspec.msgpack.decode(await _next(reader), type=Started)
            return cls(child, reader, writer, started.error)
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            raise GrammarsUnavailable("The process that checks grammars did not start.") from error
        finally:
            if started is None:
                ours.close() if writer is None else writer.close()
                if child is not None:
                    await child.kill(KILL_WAIT_S)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def check(self, text: str, *, gbnf: bool) -> Checked:
        """Raises GrammarsUnavailable where the process is lost meanwhile."""
        if not self.alive:
            raise _lost()
        number = next(self._ids)
        answer: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._writer.write(frame(Check(number, text, gbnf)))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """It, and what it has under way, ends."""
        self.alive = False
        self._reading.cancel()
        self._writer.close()
        await self._child.kill(KILL_WAIT_S)

    async def _read(self) -> None:
        try:
            while True:
                checked = msgspec.msgpack.decode(await _next(self._reader), type=Checked)
                answer = self._waiting.get(checked.id)
                if answer is not None and not answer.done():
                    answer.set_result(checked)
        except (OSError, EOFError, msgspec.MsgspecError):
            await self._child.kill(KILL_WAIT_S)
        finally:
            self.alive = False
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_lost())


async def _next(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises EOFError."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return await reader.readexactly(length)
    raise EOFError


def _lost() -> GrammarsUnavailable:
    return GrammarsUnavailable("The process that checks grammars was lost. Please try again.")
