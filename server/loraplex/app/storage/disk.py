"""A folder and the disk below it, and the sentences for one that has no room. Nothing that lasts is written."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loraplex.adapters.store.files import has_no_room
from loraplex.app.settings import Settings

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Disk:
    """A folder and the disk below it. `existing` is the folder itself, or the nearest one above it that is there.
    `obstacle`: why nothing can be written. `sync_s`: seconds until a first block was on the disk, None if the folder is
    not there yet. `device` is the file system's number."""

    path: Path
    existing: Path
    free: int
    file_system: str
    device: int
    obstacle: str = ""
    sync_s: float | None = None

    @property
    def room(self) -> str:
        synced = "" if self.sync_s is None else f", a sync takes {self.sync_s * 1e3:.0f} ms"
        free = f"{self.free / GIB:.1f} GiB free on {self.file_system or 'an unknown file system'}"
        return f"{self.path}, {free}{synced}"


def read_disk(path: Path) -> Disk:
    """Raises OSError."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    usage = os.statvfs(existing)
    obstacle, sync_s = "", None
    if not existing.is_dir():
        obstacle = f"{existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        obstacle = f"{existing} cannot be written by this user"
    elif existing == path.absolute():
        obstacle, sync_s = _write_unnamed(existing)
    return Disk(
        path,
        existing,
        usage.f_bavail * usage.f_frsize,
        _file_system(existing),
        existing.stat().st_dev,
        obstacle,
        sync_s,
    )


def _write_unnamed(folder: Path) -> tuple[str, float | None]:
    """Write and sync a file that has no name: it is gone when it is closed, however this process ends."""
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL) or has_no_room(error):
            return "", None  # a file system without such files: access says it is writable
        return f"{folder}: {error.strerror}", None
    try:
        os.write(handle, bytes(4096))
        began = time.monotonic()
        os.fsync(handle)
        return "", time.monotonic() - began
    except OSError as error:
        return ("", None) if has_no_room(error) else (f"{folder}: {error.strerror}", None)
    finally:
        os.close(handle)


def _file_system(path: Path) -> str:
    """The type of a file system, by the longest mount point above `path`; "" where it is not known."""
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    best = ("", "")
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        if (path == Path(point) or Path(point) in path.parents) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def data_room(settings: Settings) -> tuple[int, str]:
    """The bytes that a data directory needs free, and the words for it."""
    wanted = settings.usage_journal_size + GIB
    remedy = (
        f"make room: {wanted / GIB:.1f} GiB are wanted, for usage (--usage-journal-size) and the database"
    )
    return wanted, remedy


def full_disk(error: BaseException, folder: Path, remedy: str) -> str | None:
    """The sentence where a full disk caused `error`: the file that found no room, the disk of `folder`, the remedy.
    None for any other error."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and has_no_room(cause):
            return f"no room for {cause.filename or folder}: {read_disk(folder).room}: {remedy}."
        if isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode == sqlite3.SQLITE_FULL:
            return f"no room for {folder / 'loraplex.db'}: {read_disk(folder).room}: {remedy}."
    return None


def full_data_dir(error: BaseException, settings: Settings) -> str | None:
    """The same of the data directory, in the doctor's words."""
    return full_disk(error, settings.data_dir, data_room(settings)[1])


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
