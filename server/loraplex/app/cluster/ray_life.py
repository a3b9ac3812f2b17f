"""One Ray, from its start to its end: the process that holds it, and one manager after the other.

Engines serve on without a manager, so that one which ends is followed by the next on the same Ray. A cluster that runs
already has managers alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loraplex.app.cluster.environment import make_ray_folder, new_token, ray_environment, remove_ray_folder
from loraplex.app.cluster.process import EventProcess
from loraplex.app.cluster.spec import ClusterSpec, Event

HEAD_COMMAND = (sys.executable, "-m", "loraplex.app.cluster.head")
MANAGER_COMMAND = (sys.executable, "-m", "loraplex.app.cluster.manager")
DELAY_S = 0.5
MANAGER_TRIES = 3
"""Managers in a row that do not find their engines, before Ray itself is taken for lost."""


class RayLife:
    """`on_event` gets what its processes tell, `on_manager_lost` the reason and the seconds until the next one starts.
    `write` gets the log lines of engines. Belongs to one event loop's thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        on_event: Callable[[Event], None],
        on_manager_lost: Callable[[str, float], None],
        write: Callable[[str], None],
        head: Sequence[str] = HEAD_COMMAND,
        manager: Sequence[str] = MANAGER_COMMAND,
    ) -> None:
        self._spec = spec
        self._on_event = on_event
        self._on_manager_lost = on_manager_lost
        self._head = EventProcess(head, on_event=self._hear, write=write)
        self._manager: EventProcess | None = None
        self._command, self._write = manager, write
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.was_ready = False
        """Whether all its engines have served."""
        self.is_headless = False
        """Whether it cannot be managed any longer; its engines serve on."""
        self.reason = ""
        """Why it has ended."""
        self._failed = 0

    @property
    def prefix(self) -> str:
        return self._spec.prefix

    @property
    def manager_pid(self) -> int | None:
        return None if self._manager is None else self._manager.pid

    async def run(self) -> None:
        """Return when Ray has ended. A cancellation ends it, with its engines."""
        folder = make_ray_folder()
        try:
            await self._run(folder)
        finally:
            await asyncio.to_thread(remove_ray_folder, folder)

    async def _run(self, folder: Path) -> None:
        spec = msgspec.structs.replace(self._spec, folder=str(folder))
        if spec.address:
            environment = ray_environment(os.environ, folder, token=None)
            self._address.set_result("")
            await self._manage(spec, environment)
            return
        environment = ray_environment(os.environ, folder, token=new_token())
        holding = asyncio.create_task(self._head.run(_known(f"{folder}\n".encode()), environment))
        managing = asyncio.create_task(self._manage(spec, environment))
        try:
            await asyncio.wait({holding, managing}, return_when=asyncio.FIRST_COMPLETED)
            if managing.done():
                managing.result()
            if self.is_headless or holding.done():
                await holding
                self.reason = self._head.reason
        finally:
            for task in (managing, holding):
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _manage(self, spec: ClusterSpec, environment: dict[str, str]) -> None:
        """Run managers; returns when the last one has ended that is worth a try."""
        while True:
            self._failed += 1  # until it is ready
            manager = self._manager = EventProcess(self._command, on_event=self._hear, write=self._write)
            await manager.run(self._line(spec), environment)
            self.reason = manager.reason
            if self.is_headless or not self.was_ready:
                return
            if self._failed == MANAGER_TRIES:
                if not spec.address:
                    self._hear(Event("head_lost"))
                return
            self._on_manager_lost(self.reason, DELAY_S)
            await asyncio.sleep(DELAY_S)

    async def _line(self, spec: ClusterSpec) -> bytes:
        """The first line of a manager's stdin, when Ray's address is known."""
        head = await asyncio.shield(self._address)
        return msgspec.json.encode(msgspec.structs.replace(spec, head=head)) + b"\n"

    def _hear(self, event: Event) -> None:
        if event.name == "started" and not self._address.done():
            self._address.set_result(event.address)
        elif event.name == "ready":
            self.was_ready, self._failed = True, 0
        elif event.name == "head_lost":
            self.is_headless = True
        self._on_event(event)


async def _known(line: bytes) -> bytes:
    return line
