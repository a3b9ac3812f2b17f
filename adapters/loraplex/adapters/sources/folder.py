"""Reading an adapter from a folder of the server's file system that tenants may write into.

Every part of a path is opened relative to the folder before it and without following links, so that nothing that is
renamed or replaced meanwhile leads out of the allowed root. Links within the root are followed by hand. In the root
itself only the operator's own part may have links: what lies below a tenant's folder is the tenant's to replace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import (
    CHAT_FILE_BYTES,
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
MAX_FOLDERS = 64
"""Folders that are opened for one adapter. They stay open until it is copied."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def copy_folder(
    source: Source, staging: Staging, *, max_bytes: int, reserve: Callable[[int], None] = lambda _: None
) -> None:
    """Copy an adapter's two files and those of its chats into `staging`. All are opened and measured before a byte is
    copied; `reserve` hears of their sizes and may raise. Files that change while they are copied are refused.

    Raises SourceNotAllowed (a link that leads out of the root), SourceNotFound, SourceUnavailable, AdapterRefused
    (too_large), StoreFull, StoreFailed, and what `reserve` raises.
    """
    with contextlib.ExitStack() as stack:
        folder = _AdapterFolder(source, stack)
        opened = {
            name: folder.open(name, MAX_CONFIG_BYTES if name == CONFIG_NAME else max_bytes)
            for name in (CONFIG_NAME, TENSORS_NAME)
        }
        for name, most in CHAT_FILE_BYTES.items():
            with contextlib.suppress(SourceNotFound):
                opened[name] = folder.open(name, most)
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


class _AdapterFolder:
    """An adapter's folder, found once: both files are looked up from it, so that they belong together, whatever takes
    its place meanwhile. `descriptors` closes what is opened.

    Raises SourceNotAllowed, SourceNotFound, SourceUnavailable.
    """

    def __init__(self, source: Source, descriptors: contextlib.ExitStack) -> None:
        self._source = source
        self._descriptors = descriptors
        self._left_folders = MAX_FOLDERS
        self._left_links = MAX_LINKS
        # Folders that lead to each other: the root, which is never left, and one for each part below it.
        self._way: list[int] = []
        with self._failures_named("folder", source.parts):
            root = self._open("/" + "/".join(source.root[: source.num_trusted]), _FOLDER)
            for part in source.root[source.num_trusted :]:
                root = self._open(part, _FOLDER | os.O_NOFOLLOW, root)
            self._way.append(root)
            for part in source.parts:
                self._walk(self._way, [part], to_file=False)

    def open(self, name: str, max_bytes: int) -> tuple[int, os.stat_result]:
        """One of its files, which is a regular one, and what it was when it was opened. Opening it never waits. Raises
        AdapterRefused (too_large) too."""
        parts = (*self._source.parts, name)
        with self._failures_named("file", parts):
            file = self._walk(self._way.copy(), [name], to_file=True)
            found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise SourceNotFound(f"In the source, {_written(parts)} is not a regular file.")
        if found.st_size > max_bytes:
            raise _too_large(name, max_bytes)
        return file, found

    def _walk(self, way: list[int], todo: list[str], *, to_file: bool) -> int:
        """Go on from the end of `way` by the parts of `todo`, the next one last, and by what links add to them. Returns
        the last descriptor."""
        while todo:
            part = todo.pop()
            if part == "..":
                if len(way) == 1:
                    raise _leads_out()
                way.pop()
            elif part not in ("", "."):
                kind = os.stat(part, dir_fd=way[-1], follow_symlinks=False).st_mode
                if stat.S_ISLNK(kind):
                    todo.extend(self._linked(os.readlink(part, dir_fd=way[-1])))
                elif todo or not to_file:
                    way.append(self._open(part, _FOLDER | os.O_NOFOLLOW, way[-1]))
                elif not stat.S_ISREG(kind):
                    raise SourceNotFound(f"In the source, {shown(part)} is not a regular file.")
                else:
                    return self._open(part, _FILE, way[-1])
        if to_file:  # a link to a folder
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return way[-1]

    def _linked(self, target: str) -> list[str]:
        self._left_links -= 1
        if target.startswith("/") or self._left_links < 0:
            raise _leads_out()
        return target.split("/")[::-1]

    def _open(self, path: str, flags: int, folder: int | None = None) -> int:
        if flags & os.O_DIRECTORY:
            self._left_folders -= 1
            if self._left_folders < 0:
                raise SourceNotAllowed(f"The way to the source has more than {MAX_FOLDERS} folders.")
        descriptor = os.open(path, flags, dir_fd=folder)
        self._descriptors.callback(os.close, descriptor)
        return descriptor

    @contextlib.contextmanager
    def _failures_named(self, kind: str, parts: tuple[str, ...]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = _written(parts)
            if error.errno in _ABSENT:
                raise SourceNotFound(f"The source has no {kind} {what} that this server can read.") from None
            raise SourceUnavailable(f"{what} cannot be read: {error.strerror}.") from error


def _written(parts: tuple[str, ...]) -> str:
    return shown("/".join(parts), 200)


def _leads_out() -> SourceNotAllowed:
    return SourceNotAllowed("A link in the source leads out of the folder that is allowed.")


def _too_large(what: str, max_bytes: int) -> AdapterRefused:
    return AdapterRefused("too_large", f"In the source, {what} is larger than {max_bytes} bytes.")
