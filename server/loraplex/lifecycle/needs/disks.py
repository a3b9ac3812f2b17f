"""The room on the disks that this server writes to."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that the server writes to: what it `holds`, and the bytes that are `wanted` free on its disk."""

    holds: Literal["data", "adapters", "prefixes"]
    path: Path
    wanted: int


@dataclass(frozen=True, slots=True)
class Room:
    """The disk of a folder: its size, and what is left of it for the server, in bytes."""

    folder: Folder
    free: int
    size: int


def read_rooms(folders: Sequence[Folder]) -> list[Room]:
    """The room of each folder that can be reached. It may block: a network's file system takes its time."""
    found = []
    for folder in folders:
        existing = folder.path.absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        try:
            usage = shutil.disk_usage(existing)
        except OSError:
            continue  # out of reach: no figure is better than a false one
        found.append(Room(folder, usage.free, usage.total))
    return found
