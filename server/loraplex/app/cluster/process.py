"""One process below the server that starts Ray or holds its driver, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from loraplex.app.cluster.spec import Event

END_S = 10.0
"""Time for a process to end; then it is killed."""
READ_S = 1.0
"""Time for the last lines of a process that has ended."""
LAST_LINES = 20
_LINE_BYTES = 1 << 20
_ORIGIN = re.compile(r"^(?:\x1b\[\d+m)?\((?P<name>[^)]*)\)(?:\x1b\[0m)? ?(?P<text>.*)$")
"""The beginning of a line that Ray passes on from one of its processes."""


class EventProcess:
    """`on_event` gets the process's `Event` lines, `write` the log lines of engines that pass through it."""

    def __init__(
        self, command: Sequence[str], *, on_event: Callable[[Event], None], write: Callable[[str], None]
    ) -> None:
        self._command = command
        self._on_event = on_event
        self._write = write
        self._process: asyncio.subprocess.Process | None = None
        self._last = deque[str](maxlen=LAST_LINES)
        self._failure = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def reason(self) -> str:
        """Why it has ended: as it said itself, else its status and the last that it or Ray wrote."""
        if self._failure or self._process is None:
            return self._failure
        *_, last = ["", *self._last]
        return f"it ended with status {self._process.returncode}: {last}".rstrip(": ")

    async def run(self, line: Awaitable[bytes], environment: Mapping[str, str]) -> None:
        """Run it until it ends. `line` is the first of its stdin, which stays open. A cancellation ends it first."""
        async with contextlib.AsyncExitStack() as stack:
            # Pipes of our own: asyncio's are not done with a process before all that inherited them have ended.
            events, events_end = await _open_pipe(stack)
            lines, lines_end = await _open_pipe(stack)
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=events_end,
                    stderr=lines_end,
                    env=environment,
                    start_new_session=True,  # a Ctrl-C at the terminal is the server's to handle
                )
            finally:
                os.close(events_end)
                os.close(lines_end)
            tasks = [
                asyncio.create_task(self._read_events(events)),
                asyncio.create_task(self._read_lines(lines, environment)),
            ]
            feeding = asyncio.create_task(_feed(process, line))
            try:
                await process.wait()
            finally:
                feeding.cancel()
                await _end(process)
                await asyncio.wait(tasks, timeout=READ_S)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(feeding, *tasks, return_exceptions=True)

    async def _read_events(self, pipe: asyncio.StreamReader) -> None:
        while line := await pipe.readline():
            event = msgspec.json.decode(line, type=Event)
            if event.name == "failed":
                self._failure = event.reason
            self._on_event(event)

    async def _read_lines(self, pipe: asyncio.StreamReader, environment: Mapping[str, str]) -> None:
        folder = environment.get("TMPDIR", "")
        while True:
            try:
                line = await pipe.readline()
            except ValueError:  # longer than the limit: the buffer goes on behind it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            origin = _ORIGIN.match(text)
            if origin is not None and origin["text"].startswith('{"'):
                self._write(origin["text"])
            elif text:
                self._last.append(text.replace(folder, "…") if folder else text)


async def _feed(process: asyncio.subprocess.Process, line: Awaitable[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(await line)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _open_pipe(stack: contextlib.AsyncExitStack) -> tuple[asyncio.StreamReader, int]:
    """A reader, which ends with the stack, and the descriptor of the end that is written, which is the caller's."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    stack.callback(transport.close)
    return reader, write_end
