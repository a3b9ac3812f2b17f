"""What a process really does to files and to the database, beside what it announces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from loraplex.adapters.store.fault_points import FaultPoint

KINDS: dict[str, frozenset[FaultPoint]] = {
    "mkdir": frozenset({FaultPoint.MAKE_STORE, FaultPoint.STAGE, FaultPoint.MAKE_SHELF}),
    "create": frozenset({FaultPoint.RECEIVE_CREATE, FaultPoint.UNPACK_CREATE}),
    "write": frozenset({FaultPoint.RECEIVE_WRITE, FaultPoint.UNPACK_WRITE}),
    "fsync": frozenset(
        {
            FaultPoint.FLUSH_STORE,
            FaultPoint.FLUSH_STAGED,
            FaultPoint.FLUSH_FILE,
            FaultPoint.FLUSH_FOLDER,
            FaultPoint.FLUSH_SHELVES,
            FaultPoint.FLUSH_SHELF,
            FaultPoint.FLUSH_RETIRED,
        }
    ),
    "rename": frozenset({FaultPoint.PUBLISH, FaultPoint.RETIRE}),
    "remove": frozenset({FaultPoint.DROP_LEFTOVER, FaultPoint.PURGE, FaultPoint.DISCARD, FaultPoint.SWEEP}),
    "commit": frozenset(
        {
            FaultPoint.COMMIT_VERSION,
            FaultPoint.COMMIT_DURABLE,
            FaultPoint.COMMIT_LOST,
            FaultPoint.COMMIT_CHECK,
            FaultPoint.COMMIT_REMOVAL,
            FaultPoint.MARK_CORRUPT,
        }
    ),
}
_MADE = {"os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove"}


@dataclass(frozen=True)
class Seen:
    """Something that was done (`what` is a kind), or a step that was announced (`announced`, `what` its name)."""

    what: str
    path: str | None
    announced: bool


def unannounced(seen: Iterable[Seen]) -> list[Seen]:
    """What was done without its own announcement since the one before; one announcement covers one change; a sweep's
    covers a tree."""
    missing: list[Seen] = []
    last: Seen | None = None
    for entry in seen:
        if entry.announced:
            last = entry
        elif last is None or last.what not in KINDS[entry.what] or not _covers(last, entry):
            missing.append(entry)
        elif last.what != FaultPoint.SWEEP:
            last = None
    return missing


def _covers(announced: Seen, done: Seen) -> bool:
    if announced.what == FaultPoint.SWEEP and done.path is not None:
        return Path(done.path).is_relative_to(announced.path or "/nowhere")
    return announced.path == done.path


class Witness:
    """A fault that watches its own process from now on, by an audit hook: for one that ends soon. Only what changes
    below `root` counts, and commits of transactions that changed something."""

    def __init__(self, root: Path) -> None:
        self.points: list[Any] = []
        self.seen: list[Seen] = []
        self._root = root
        self._sizes: dict[int, int] = {}
        self._changed = False
        self._grown()
        self.seen.clear()
        sys.addaudithook(self._audit)
        real = os.fsync

        def fsync(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            self._did("fsync", os.readlink(f"/proc/self/fd/{number}"))
            real(fd)

        os.fsync = fsync
        event.listen(Engine, "before_cursor_execute", self._statement)
        event.listen(Engine, "commit", self._commit)

    def __call__(self, step: FaultPoint, path: Path | None = None, to: Path | None = None, /) -> None:
        self._grown()
        self.seen.append(Seen(str(step), None if path is None else str(path), True))

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and not isinstance(arguments[0], int):
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                self._did("create", path)
        elif name in _MADE:
            folder = arguments[-1]
            path = arguments[0]
            if isinstance(folder, int) and folder >= 0 and not os.path.isabs(path):
                path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
            self._did(_MADE[name], path)

    def _did(self, what: str, path: Any) -> None:
        text = os.fsdecode(path)
        # The folder that holds the root is flushed for the root's sake.
        if Path(text).is_relative_to(self._root) or (what == "fsync" and Path(text) == self._root.parent):
            self._grown()
            self.seen.append(Seen(what, text, False))

    def _grown(self) -> None:
        sizes: dict[int, int] = {}  # by inode: a file that is renamed has not grown
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = os.path.join(folder, name)
                found = os.lstat(path)
                sizes[found.st_ino] = found.st_size
                if found.st_size > self._sizes.get(found.st_ino, 0):
                    self.seen.append(Seen("write", path, False))
        self._sizes = sizes

    def _statement(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self._changed |= statement.startswith(("INSERT", "UPDATE", "DELETE"))

    def _commit(self, _connection: Any) -> None:
        if self._changed:
            self.seen.append(Seen("commit", None, False))
        self._changed = False
