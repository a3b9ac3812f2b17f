"""The room on the disks that this server writes to."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio
from anyio import to_thread


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that the server writes to: what it `holds`, and the bytes that are `wanted` free on its disk."""

    holds: Literal["data", "adapters", "prefixes"]
    path: Path
    wanted: int


@dataclass(frozen=True, slots=True)
class Room:
    """The disk of a folder: its size, and what is left of it for the server, in bytes. With an `error` it could not be
    read, and both are 0."""

    folder: Folder
    free: int = 0
    size: int = 0
    error: str = ""


class RoomReader:
    """Reads the room on disks in a thread of its own, one reading at a time: a disk that hangs takes no more threads,
    and nobody waits for it longer than `wait_s` seconds."""

    def __init__(self, wait_s: float = 2.0) -> None:
        self._wait_s = wait_s
        self._limiter = anyio.CapacityLimiter(1)
        self._reading = threading.Lock()
        """The thread holds it: a reading that was given up may go on."""
        self._at: Folder | None = None

    async def read(self, folders: Sequence[Folder]) -> list[Room]:
        """The room of each folder. Where a disk does not answer, that one alone, with an error."""
        with anyio.move_on_after(self._wait_s):
            found = await to_thread.run_sync(
                self._read, folders, abandon_on_cancel=True, limiter=self._limiter
            )
            if found is not None:
                return found
        error = f"the disk did not answer within {self._wait_s:g} s"
        return [] if (at := self._at) is None else [Room(at, error=error)]

    def _read(self, folders: Sequence[Folder]) -> list[Room] | None:
        """None while another reading goes on."""
        if not self._reading.acquire(blocking=False):
            return None
        try:
            found = []
            for folder in folders:
                self._at = folder
                found.append(_read_room(folder))
            self._at = None
            return found
        finally:
            self._reading.release()


def _read_room(folder: Folder) -> Room:
    try:
        existing = folder.path.absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        usage = shutil.disk_usage(existing)
    except OSError as error:
        return Room(folder, error=error.strerror or str(error))
    return Room(folder, usage.free, usage.total)
