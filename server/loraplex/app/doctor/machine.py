"""Facts of this machine, for the doctor. Nothing that lasts is written."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraplex.app.cluster.choice import ray_version
from loraplex.app.engines.port import engine_token_path
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.app.storage.data_dir_lock import is_data_dir_locked
from loraplex.engine.control_groups import ControlGroups

_TIME_ERROR = 5
"""adjtimex's value for a clock that is not synchronised."""
_TIMEX_BYTES = 512
_SECRETS = ("key-pepper", "admin-token", "loraplex.db")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


@dataclass(frozen=True, slots=True)
class Device:
    """Where the engine runs, `cpu` or `cuda`, and the bytes of a GPU's own memory."""

    kind: Literal["cpu", "cuda"]
    total: int = 0


@dataclass(frozen=True, slots=True)
class SecretFile:
    path: Path
    mode: int
    is_own: bool


@dataclass(frozen=True, slots=True)
class Port:
    """`obstacle`: why a server cannot listen there."""

    address: str
    obstacle: str = ""
    is_in_use: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes, of this machine and of its control group. `open_files` None: no limit. `huge_pages` is the
    kernel's setting of transparent huge pages, "" where it has none. `clock_synchronised` None: unknown. `store` are
    the folders between which an upload is renamed. `is_held`: a server runs on the data directory. `engine_port`
    None: none is wanted. `shared_memory`: what is free of /dev/shm. `ray`: the version of Ray that is installed."""

    python: str
    memory_total: int
    memory_available: int
    open_files: int | None
    huge_pages: str
    clock_synchronised: bool | None
    data: Disk
    store: tuple[Disk, ...]
    secrets: tuple[SecretFile, ...]
    data_port: Port
    admin_port: Port
    is_held: bool = False
    engine_port: Port | None = None
    shared_memory: int = 0
    ray: str | None = None


def read_machine(settings: Settings) -> Machine:
    """Raises SettingsInvalid for a wrong --artifact-url, OSError where /proc is missing."""
    total, available = _memory()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = artifact_dir(settings)
    return Machine(
        python=f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores",
        memory_total=total,
        memory_available=available,
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        huge_pages=_huge_pages(),
        clock_synchronised=_clock_synchronised(),
        data=_disk(settings.data_dir),
        store=tuple(_disk(store / name) for name in ("staging", "sha256")),
        secrets=tuple(_secrets(settings)),
        data_port=_port(settings.host, settings.port),
        admin_port=_port(settings.admin_host, settings.admin_port),
        is_held=is_data_dir_locked(settings.data_dir),
        engine_port=_port(settings.engine_host, settings.engine_port) if settings.engine_port else None,
        shared_memory=_shared_memory(),
        ray=ray_version(),
    )


def _port(host: str, port: int) -> Port:
    address = f"{host}:{port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Port(address, error.strerror or str(error), error.errno == errno.EADDRINUSE)
    return Port(address)


def _memory() -> tuple[int, int]:
    found = {}
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) << 10
    total, available = found["MemTotal"], found["MemAvailable"]
    free = ControlGroups().free_memory()
    if free is not None and free < available:
        return min(total, free), free  # what is taken in the group is not this server's to have
    return total, available


def _huge_pages() -> str:
    try:
        words = _THP.read_text("ascii").split()
    except OSError:
        return ""
    return next((word.strip("[]") for word in words if word.startswith("[")), "")


def _clock_synchronised() -> bool | None:
    """The kernel's own account, without changing anything: `modes` is 0."""
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))) not in (
            -1,
            _TIME_ERROR,
        )
    except (AttributeError, OSError):
        return None


def _disk(path: Path) -> Disk:
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
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return "", None  # a file system without such files: access says it is writable
        return f"{folder}: {error.strerror}", None
    try:
        os.write(handle, bytes(4096))
        began = time.monotonic()
        os.fsync(handle)
        return "", time.monotonic() - began
    except OSError as error:
        return f"{folder}: {error.strerror}", None
    finally:
        os.close(handle)


def _file_system(path: Path) -> str:
    """Its type by the longest mount point above `path`; "" where it is not known."""
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


def _shared_memory() -> int:
    try:
        usage = os.statvfs("/dev/shm")  # noqa: S108 - where Ray keeps its objects
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize


def _secrets(settings: Settings) -> list[SecretFile]:
    found = []
    for path in (*(settings.data_dir / name for name in _SECRETS), engine_token_path(settings)):
        try:
            status = path.lstat()
        except OSError:
            continue
        found.append(SecretFile(path, stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()))
    return found
