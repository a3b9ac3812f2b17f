"""Reading an adapter from a folder of the server's file system that tenants may write into.

Every part of a path is opened relative to the folder before it and without following links, so that nothing that is
renamed or replaced meanwhile leads out of the allowed root. Links within the root are followed by hand. In the root
itself only the operator's own part may have links: what lies below a tenant's folder is the tenant's to replace.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator

from loraplex.adapters.contents.places import Contents, Folder, folders_shown
from loraplex.adapters.errors import AdapterRefused
from loraplex.adapters.sources.errors import SourceNotAllowed, SourceNotFound, SourceUnavailable
from loraplex.adapters.sources.urls import Source
from loraplex.adapters.store.artifact_store import Staging
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.adapters.store.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    TENSORS_NAME,
    TENSORS_NAMES,
    TOKENIZER_NAME,
    UPLOAD_FILE_BYTES,
    create_file,
    disk_failures_named,
    place_in,
    shown,
    write_all,
)

MAX_LINKS = 16
MAX_ENTRIES = 1000
"""Names of a folder without an adapter that are looked at."""
MAX_FOLDERS = 64
"""Folders that are opened for one adapter. They stay open until it is copied."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})


def copy_folder(
    source: Source, staging: Staging, *, max_bytes: int, reserve: Callable[[int], None] = lambda _: None
) -> None:
    """Copy an adapter's two files and those of its chats into `staging`: of the folder that the source names or, where
    that has none, of the one folder in it that does. All are opened and measured before a byte is copied; `reserve`
    hears of their sizes and may raise. Files that change while they are copied are refused.

    Raises SourceNotAllowed (a link that leads out of the root), SourceNotFound, SourceUnavailable, AdapterRefused
    (too_large, not_safetensors for weights of another format), StoreFull, StoreFailed, and what `reserve` raises.
    """
    with contextlib.ExitStack() as stack:
        folder = _AdapterFolder(source, stack)
        tensors_name = folder.find_adapter()
        opened = {
            CONFIG_NAME: folder.open(CONFIG_NAME, MAX_CONFIG_BYTES),
            TENSORS_NAME: folder.open(tensors_name, max_bytes),
        }
        for name, most in UPLOAD_FILE_BYTES.items():
            with contextlib.suppress(SourceNotFound):
                try:
                    opened[name] = folder.open(name, most)
                except AdapterRefused:
                    if name != TOKENIZER_NAME:
                        raise
        total = sum(found.st_size for _, found in opened.values())
        if total > max_bytes:
            raise _too_large("the adapter", max_bytes)
        reserve(total)
        for name, (file, found) in opened.items():
            _copy(file, found, name, staging)


def _copy(file: int, found: os.stat_result, name: str, staging: Staging) -> None:
    with disk_failures_named():
        target = place_in(staging.directory, name)
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
        self._below: Folder = ()
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

    def find_adapter(self) -> str:
        """The name of the tensors, after going into the one folder below that holds an adapter if this one holds none.
        Raises SourceNotFound where several do, AdapterRefused (not_safetensors)."""
        with self._failures_named("folder", self._source.parts):
            here = Contents.of((name,) for name in _adapter_files(self._way[-1])).chosen()
            if here is not None:
                return here[1]
            contents = Contents.of(_other_files(self._way[-1]))
            contents.check_format()
            chosen = contents.chosen()
            if chosen is not None:
                self._below = chosen[0]
                self._walk(self._way, list(chosen[0]), to_file=False)
                return chosen[1]
        if contents.adapters:
            folders = folders_shown([folder for folder, _ in contents.adapters])
            raise SourceNotFound(
                f"The source holds several adapters, in {folders}; name one of these folders."
            )
        return TENSORS_NAME

    def open(self, name: str, max_bytes: int) -> tuple[int, os.stat_result]:
        """One of its files, which is a regular one, and what it was when it was opened. Opening it never waits. Raises
        AdapterRefused (too_large) too."""
        parts = (*self._source.parts, *self._below, name)
        with self._failures_named("file", parts):
            file = self._walk(self._way.copy(), name.split("/")[::-1], to_file=True)
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


def _adapter_files(folder: int) -> Iterator[str]:
    """The names of an adapter's files that an open folder has, whatever they are: the caller opens what it takes."""
    for name in (CONFIG_NAME, *TENSORS_NAMES):
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            yield name


def _other_files(folder: int) -> Iterator[Folder]:
    """The names of an open folder's files, and those of an adapter's files in the folders in it, links left out."""
    below: list[str] = []
    with os.scandir(folder) as entries:
        for entry in itertools.islice(entries, MAX_ENTRIES):
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
            else:
                yield (entry.name,)
    for name in below:
        # It may have been exchanged meanwhile, or not be readable.
        with contextlib.suppress(OSError):
            descriptor = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            try:
                yield from ((name, file) for file in _adapter_files(descriptor))
            finally:
                os.close(descriptor)


def _written(parts: tuple[str, ...]) -> str:
    return shown("/".join(parts), 200)


def _leads_out() -> SourceNotAllowed:
    return SourceNotAllowed("A link in the source leads out of the folder that is allowed.")


def _too_large(what: str, max_bytes: int) -> AdapterRefused:
    return AdapterRefused("too_large", f"In the source, {what} is larger than {max_bytes} bytes.")
