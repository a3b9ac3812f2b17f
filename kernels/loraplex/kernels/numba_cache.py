"""Where numba keeps what it has compiled: a directory for each content of this package.

numba compiles a function anew when the function's own file has changed, but not when a file has from which it calls
something or takes a constant: after an update it would run the machine code of before, silently. So the directory's
name is a digest of all sources here and of the versions of numba and llvmlite. What numba itself tells apart, types
and processors, lies side by side in it.

`numba_vectors` imports this before anything is compiled. numba asks for the directory when a function is
decorated, so it is found, made and marked as used when this is imported: the one thing here that touches files then.
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
from typing import IO

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
    """The directory below `root` for the content of the *.py in `sources`, made if need be and marked as used now.
    None, and a warning, where it can't be written: then nothing is kept."""
    directory = root / (_PREFIX + _digest(sources))
    try:
        # Its files are unpickled: they are to be nobody else's, also where somebody made the directory before us.
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
    for path in sorted(sources.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _remove_old(used: Path) -> None:
    """Directories beside this one that no process has started with for `KEPT_S`."""
    for path in used.parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):  # another process was first, or it is somebody else's
            if path != used and time.time() - path.stat().st_mtime > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def _root() -> Path:
    """What NUMBA_CACHE_DIR names, else `loraplex/kernels` in the user's cache directory, beside fetched models."""
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loraplex" / "kernels"


class _OneProcess(event.Listener):
    """Lets one process at a time compile, and read and write the directory.

    numba adds to the index of a function what it has compiled under the next free number. Two processes that do so at
    once, for two dtypes, take the same number, and the index would lead from one dtype to the other's code.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.RLock()
        self._depth = 0
        self._waited_s = 0.0
        self._held: IO[str] | None = None

    def on_start(self, _event: event.Event) -> None:
        # Outside numba's own lock of threads, and as that one is, of one thread and as often as it likes.
        self._thread.acquire()
        self._depth += 1
        if self._depth == 1:
            begin = time.monotonic()
            self._held = _lock(self._path, LOCK_WAIT_S - self._waited_s)
            self._waited_s += time.monotonic() - begin

    def on_end(self, _event: event.Event) -> None:
        self._depth -= 1
        if self._depth == 0 and self._held is not None:
            self._held.close()
            self._held = None
        self._thread.release()


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


def _use(directory: Path | None) -> Path | None:
    if directory is not None:
        config.CACHE_DIR = str(directory)
        event.register("numba:compiler_lock", _OneProcess(directory / "lock"))
    return directory


CACHE = _use(open_cache(_root(), Path(__file__).parent))
"""Where compiled code is kept; None where nothing is."""


def is_compiled(what: str, cache: Path | None = CACHE) -> bool:
    """Whether `compile_kernels` has been through for this on such a processor."""
    return cache is not None and _mark(what, cache).exists()


def compile_kernels(what: str, work: Callable[[], None], cache: Path | None = CACHE) -> None:
    """Do `work`, which calls kernels so that they are compiled or read from the cache, and remember that it is done;
    directories of contents that are no longer used are removed. Raises what `work` raises."""
    try:
        work()
    except (EOFError, pickle.UnpicklingError):
        # A file was cut, as by a loss of power. Without this no start would ever succeed again.
        if cache is None:
            raise
        _log.warning("the compiled kernels in %s are damaged: they are compiled again", cache)
        for path in cache.glob("*/*.nb[ci]"):
            path.unlink(missing_ok=True)
        work()
    if cache is not None:
        with contextlib.suppress(OSError):
            _mark(what, cache).touch()
        _remove_old(cache)


def _mark(what: str, cache: Path) -> Path:
    target = repr(cpu_target.target_context.codegen().magic_tuple())
    return cache / f"{what}-{hashlib.sha256(target.encode()).hexdigest()[:16]}"
