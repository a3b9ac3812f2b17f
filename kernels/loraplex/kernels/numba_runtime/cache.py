"""Where numba keeps what it has compiled: a directory for each content of `loraplex.kernels`.

numba compiles a function again when the function's own file has changed, but not when a file has changed from which it
calls something or takes a constant: after an update it would run the machine code of before, silently. So the
directory's name is a digest of all sources of `loraplex.kernels` and of the versions of numba and llvmlite. numba
itself keeps code for different types and processors apart in it.

Nothing is touched when this is imported: the directory is found, made and marked as used when numba first takes its
lock to compile; functions that were decorated before then begin to use it.

Private parts of numba are used here. The events of its lock (`numba.core.event`): no public event marks a compilation,
and no public lock protects the index files between processes. `cpu_target`: no public API names the processor that code
is compiled for. A function's `enable_caching`: `cache=True` of `njit` would look for the directory at the import.
"""
# mypy: allow-untyped-calls, allow-subclassing-any

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import llvmlite
import numba
from numba import config
from numba.core import event
from numba.core.registry import cpu_target

KEPT_S = 30 * 86400.0
"""How long a directory stays that no process has started with."""
LOCK_WAIT_S = 120.0
"""How long a process waits for others to compile, altogether. Then it goes on without the lock: one may be stopped."""
_NEEDED_BYTES = 64 << 20
_PREFIX = "loraplex-"
_log = logging.getLogger(__name__)


def open_cache(root: Path, sources: Path) -> Path | None:
    """The directory below `root` for the content of all *.py below `sources`, made if need be and marked as used now.
    None, and a warning, where it can't be written: then nothing is kept."""
    directory = root / (_PREFIX + _digest(sources))
    try:
        # Its files are unpickled: no other user may write them, also where another user made the directory before us.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise OSError("it is another user's, a link, or others may write to it")
        tempfile.TemporaryFile(dir=directory).close()
        os.utime(directory)
        if shutil.disk_usage(directory).free < _NEEDED_BYTES:
            raise OSError(f"less than {_NEEDED_BYTES >> 20} MiB are free")
    except OSError as error:
        _log.warning(
            "compiled kernels can't be kept in %s (%s): every start compiles them, 10 to 20 s; "
            "set NUMBA_CACHE_DIR to a directory that can be written",
            directory,
            error.strerror or error,
        )
        return None
    return directory


def _digest(sources: Path) -> str:
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}\n".encode())
    for path in sorted(sources.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _remove_old(used: Path) -> None:
    """Directories beside this one that no process has started with for `KEPT_S`."""
    for path in used.parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another process was first, or it belongs to another user
            if path != used and time.time() - path.stat().st_mtime > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def _root() -> Path:
    """The directory that NUMBA_CACHE_DIR names, else `loraplex/kernels` in the user's cache directory, beside fetched
    models."""
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loraplex" / "kernels"


def _lock(path: Path, wait_s: float) -> IO[str] | None:
    """The file, locked until it is closed, or as it is after `wait_s`; None where it can't be opened."""
    try:
        file = open(path, "w")  # noqa: SIM115 - open as long as it is locked
    except OSError:
        return None
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
        except OSError:
            pass  # a file system without locks
        return file


class KernelCache(event.Listener):
    """The compiled functions of this package, and the directory that keeps them. Hears when numba takes its lock.

    Lets one process at a time compile, and read and write the directory: numba adds to the index of a function what it
    has compiled under the next free number. Two processes that do so at once, for two dtypes, take the same number, and
    the index would lead from one dtype to the other's code.
    """

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._functions: list[Any] = []
        self._is_open = False
        self._directory: Path | None = None
        self._thread = threading.RLock()
        self._depth = 0
        self._waited_s = 0.0
        self._held: IO[str] | None = None

    def cache_function(self, function: Any) -> Any:
        """The same function of numba's, whose code will be kept."""
        with self._thread:
            if not self._functions:
                event.register("numba:compiler_lock", self)
            self._functions.append(function)
            if self._is_open and self._directory is not None:
                function.enable_caching()
        return function

    @property
    def directory(self) -> Path | None:
        """Where compiled code is kept; None where nothing is. Opened when it is asked for first."""
        with self._thread:
            if not self._is_open:
                self._is_open = True
                self._directory = open_cache(_root(), self._sources)
                if self._directory is not None:
                    config.CACHE_DIR = str(self._directory)
                    for function in self._functions:
                        function.enable_caching()
            return self._directory

    def on_start(self, _event: event.Event) -> None:
        # Outside numba's own lock of threads, and as that one is, of one thread and as often as it likes.
        self._thread.acquire()
        self._depth += 1
        if self._depth == 1 and self.directory is not None:
            begin = time.monotonic()
            self._held = _lock(self.directory / "lock", LOCK_WAIT_S - self._waited_s)
            self._waited_s += time.monotonic() - begin

    def on_end(self, _event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0 and self._held is not None:
            self._held.close()
            self._held = None
        self._thread.release()

    def is_compiled(self, what: str) -> bool:
        """Whether `compile` has finished for this on this kind of processor."""
        return self.directory is not None and _mark(what, self.directory).exists()

    def compile(self, what: str, work: Callable[[], None]) -> None:
        """Do `work`, which calls kernels so that they are compiled or read from the cache, and remember that it is
        done; directories of contents that are no longer used are removed. Raises what `work` raises."""
        directory = self.directory
        try:
            work()
        except (EOFError, pickle.UnpicklingError):
            # A file was cut, as by a loss of power. Without this no start would ever succeed again.
            if directory is None:
                raise
            _log.warning("the compiled kernels in %s are damaged: they are compiled again", directory)
            for path in directory.glob("*/*.nb[ci]"):
                path.unlink(missing_ok=True)
            work()
        if directory is not None:
            with contextlib.suppress(OSError):
                _mark(what, directory).touch()
            _remove_old(directory)


def _mark(what: str, directory: Path) -> Path:
    target = repr(cpu_target.target_context.codegen().magic_tuple())
    return directory / f"{what}-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


KERNELS = KernelCache(Path(__file__).parents[1])
