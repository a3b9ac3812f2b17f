"""Reading an adapter from a folder of the server's file system that tenants may write into.

Every part of a path is opened relative to the folder before it and without following links, so that nothing that is
renamed or replaced meanwhile leads out of the allowed root. Links within the root are followed by hand.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    TENSORS_NAME,
    create_file,
    disk_failures_named,
    shown,
    write_all,
)

MAX_CONFIG_BYTES = 1 << 20
MAX_LINKS = 16
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def copy_folder(
    source: Source, staging: Staging, *, max_bytes: int, reserve: Callable[[int], None] = lambda _: None
) -> None:
    """Copy the two files of an adapter's folder into `staging`. Both are opened and measured before a byte is copied;
    `reserve` hears of their sizes and may raise. Files that change while they are copied are refused.

    Raises SourceNotAllowed (a link that leads out of the root), SourceNotFound, SourceUnavailable, AdapterRefused
    (too_large), StoreFull, StoreFailed, and what `reserve` raises.
    """
    with contextlib.ExitStack() as stack:
        opened = {
            name: stack.enter_context(
                _opened(source, name, MAX_CONFIG_BYTES if name == CONFIG_NAME else max_bytes)
            )
            for name in (CONFIG_NAME, TENSORS_NAME)
        }
        total = sum(found.st_size for _, found in opened.values())
        if total > max_bytes:
            raise _too_large("the adapter", max_bytes)
        reserve(total)
        for name, (file, found) in opened.items():
            _copy(file, found, name, staging)


def _copy(file: int, found: os.stat_result, name: str, staging: Staging) -> None:
    target = staging.directory / name
    with disk_failures_named():
        staging.fault(FaultPoint.RECEIVE_CREATE, target)
        into = create_file(target)
    left = found.st_size
    with into:
        while left:
            try:
                data = os.read(file, min(CHUNK_BYTES, left))
            except OSError as error:
                raise SourceUnavailable(f"{name} cannot be read: {error.strerror}.") from error
            if not data:
                break
            left -= len(data)
            with disk_failures_named():
                staging.fault(FaultPoint.RECEIVE_WRITE, target)
                write_all(into, data)
    after = os.fstat(file)
    if left or (after.st_size, after.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
        raise SourceUnavailable(
            f"{name} changed while it was read. Write an adapter into a folder of its own, rename the folder to its "
            "place, and load it then."
        )


@contextmanager
def _opened(source: Source, name: str, max_bytes: int) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file of the adapter, and what it was when it was opened."""
    what = shown("/".join((*source.parts, name)), 200)
    try:
        file = _Walk(source).open(name)
    except OSError as error:
        if error.errno in _ABSENT:
            raise SourceNotFound(f"The source has no file {what} that this server can read.") from None
        raise SourceUnavailable(f"{what} cannot be read: {error.strerror}.") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise SourceNotFound(f"In the source, {what} is not a regular file.")
        if found.st_size > max_bytes:
            raise _too_large(name, max_bytes)
        yield file, found
    finally:
        os.close(file)


class _Walk:
    """From the root to one file. `_folders` are open folders: the root, and one for each part on the way."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._root = "/" + "/".join(source.root)
        self._folders: list[int] = []
        self._links = 0

    def open(self, name: str) -> int:
        """A descriptor of the file. It may be of any kind but a folder; opening it never waits. Raises OSError,
        SourceNotAllowed."""
        self._folders = [os.open(self._root, _FOLDER)]
        try:
            todo = [*reversed(self._source.parts)]
            todo.insert(0, name)
            while todo:
                part = todo.pop()
                if part == "..":
                    self._leave()
                elif part not in ("", "."):
                    found = self._enter(part, todo)
                    if found is not None:
                        return found
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))  # a link to a folder
        finally:
            for folder in self._folders:
                os.close(folder)

    def _enter(self, part: str, todo: list[str]) -> int | None:
        """One part further; the file's descriptor if it was the last. A link's parts are added to `todo`."""
        here = self._folders[-1]
        kind = os.stat(part, dir_fd=here, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            self._follow(os.readlink(part, dir_fd=here), todo)
        elif todo:
            self._folders.append(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here))
        elif not stat.S_ISREG(kind):
            raise SourceNotFound(f"In the source, {shown(part)} is not a regular file.")
        else:
            return os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
        return None

    def _follow(self, target: str, todo: list[str]) -> None:
        self._links += 1
        if target.startswith("/") or self._links > MAX_LINKS:
            raise SourceNotAllowed("A link in the source leads out of the folder that is allowed.")
        todo.extend(reversed(target.split("/")))

    def _leave(self) -> None:
        if len(self._folders) == 1:
            raise SourceNotAllowed("A link in the source leads out of the folder that is allowed.")
        os.close(self._folders.pop())


def _too_large(what: str, max_bytes: int) -> AdapterRefused:
    return AdapterRefused("too_large", f"In the source, {what} is larger than {max_bytes} bytes.")
