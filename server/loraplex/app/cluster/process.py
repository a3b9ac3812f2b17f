"""One manager process, as the server sees it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loraplex.app.cluster.environment import make_ray_folder, new_token, ray_environment, remove_ray_folder
from loraplex.app.cluster.spec import ClusterSpec, Event

MANAGER_COMMAND = (sys.executable, "-m", "loraplex.app.cluster.manager")
END_S = 10.0
"""Time for a manager to end; then it is killed."""
READ_S = 1.0
"""Time for the last lines of a manager that has ended."""
LAST_LINES = 20
_LINE_BYTES = 1 << 20
_ORIGIN = re.compile(r"^(?:\x1b\[\d+m)?\((?P<name>[^)]*)\)(?:\x1b\[0m)? ?(?P<text>.*)$")
"""The beginning of a line that Ray passes on from one of its processes."""


class ManagerProcess:
    """One life of a manager and of the Ray that it starts. `on_event` gets its events, `write` the log lines of its
    engines."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_event: Callable[[Event], None],
        write: Callable[[str], None],
        command: Sequence[str] = MANAGER_COMMAND,
    ) -> None:
        self._spec = spec
        self._on_event = on_event
        self._write = write
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._last = deque[str](maxlen=LAST_LINES)
        self.reason = ""
        """Why it failed, as it said itself."""
        self.was_ready = False
        """Whether all its engines have served."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def last_lines(self) -> list[str]:
        """The end of what it and Ray wrote that is no log line of an engine."""
        return list(self._last)

    async def run(self) -> int:
        """Run the manager; returns its exit status. A cancellation ends the manager and its Ray first."""
        folder = make_ray_folder()
        try:
            return await self._run(folder)
        finally:
            await asyncio.to_thread(remove_ray_folder, folder)

    async def _run(self, folder: Path) -> int:
        spec = msgspec.structs.replace(self._spec, folder=str(folder))
        async with contextlib.AsyncExitStack() as pipes:
            # Pipes of our own: asyncio's are not done with a process before all that inherited them have ended.
            events, events_end = await _open_pipe(pipes)
            lines, lines_end = await _open_pipe(pipes)
            try:
                process = self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=events_end,
                    stderr=lines_end,
                    env=ray_environment(os.environ, folder, token=None if spec.address else new_token()),
                    start_new_session=True,  # a Ctrl-C at the terminal is the server's to handle
                )
            finally:
                os.close(events_end)
                os.close(lines_end)
            reading = [
                asyncio.create_task(self._read_events(events)),
                asyncio.create_task(self._read_lines(lines, folder)),
            ]
            try:
                assert process.stdin is not None
                process.stdin.write(msgspec.json.encode(spec) + b"\n")
                return await process.wait()
            finally:
                await self._end(process)
                await asyncio.wait(reading, timeout=READ_S)
                for task in reading:
                    task.cancel()
                await asyncio.gather(*reading, return_exceptions=True)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _read_events(self, pipe: asyncio.StreamReader) -> None:
        while line := await pipe.readline():
            event = msgspec.json.decode(line, type=Event)
            if event.name == "failed":
                self.reason = event.reason
            self.was_ready |= event.name == "ready"
            self._on_event(event)

    async def _read_lines(self, pipe: asyncio.StreamReader, folder: Path) -> None:
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
                self._last.append(text.replace(str(folder), "…"))


async def _open_pipe(stack: contextlib.AsyncExitStack) -> tuple[asyncio.StreamReader, int]:
    """A reader, which ends with the stack, and the descriptor of the end that is written, which is the caller's."""
    read_end, write_end = os.pipe()
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
    )
    stack.callback(transport.close)
    return reader, write_end
