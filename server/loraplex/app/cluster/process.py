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
        """Its exit status. Where this is cancelled, the manager and its Ray are ended first."""
        folder = make_ray_folder()
        try:
            return await self._run(folder)
        finally:
            await asyncio.to_thread(remove_ray_folder, folder)

    async def _run(self, folder: Path) -> int:
        spec = msgspec.structs.replace(self._spec, folder=str(folder))
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=ray_environment(os.environ, folder, token=None if spec.address else new_token()),
            start_new_session=True,  # a Ctrl-C at the terminal is the server's to handle
            limit=_LINE_BYTES,
        )
        reading = [asyncio.create_task(self._read_events()), asyncio.create_task(self._read_lines(folder))]
        try:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            return await process.wait()
        finally:
            await self._end(process)
            # What Ray left may hold the pipes open.
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

    async def _read_events(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            event = msgspec.json.decode(line, type=Event)
            if event.name == "failed":
                self.reason = event.reason
            self.was_ready |= event.name == "ready"
            self._on_event(event)

    async def _read_lines(self, folder: Path) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
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
