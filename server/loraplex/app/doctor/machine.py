"""Facts of this machine, for the doctor. Nothing that lasts is written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loraplex.app.cluster.choice import ray_version
from loraplex.app.engines.port import engine_token_path
from loraplex.app.setting_types import kv_disk
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.app.storage.data_dir_lock import is_data_dir_locked
from loraplex.app.storage.disk import Disk, read_disk
from loraplex.engine.control_groups import ControlGroups

_TIME_ERROR = 5
"""adjtimex's value for a clock that is not synchronised."""
_TIMEX_BYTES = 512
_SECRETS = ("key-pepper", "admin-token", "loraplex.db")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class EngineDevice:
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
    None: none is wanted. `shared_memory`: what is free of /dev/shm. `ray`: the version of Ray that is installed.
    `prefixes`: the folder of --kv-disk, None without one; `prefix_bytes` are there already."""

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
    prefixes: Disk | None = None
    prefix_bytes: int = 0


def read_machine(settings: Settings) -> Machine:
    """Raises SettingsInvalid for a wrong --artifact-url, OSError where /proc is missing."""
    total, available = _memory()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = artifact_dir(settings)
    prefixes = Path(kv_disk(settings.kv_disk).directory) if settings.kv_disk else None
    return Machine(
        python=f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores",
        memory_total=total,
        memory_available=available,
        open_files=None if hard == resource.RLIM_INFINITY else hard,
        huge_pages=_huge_pages(),
        clock_synchronised=_clock_synchronised(),
        data=read_disk(settings.data_dir),
        store=tuple(read_disk(store / name) for name in ("staging", "sha256")),
        secrets=tuple(_secrets(settings)),
        data_port=_port(settings.host, settings.port),
        admin_port=_port(settings.admin_host, settings.admin_port),
        is_held=is_data_dir_locked(settings.data_dir),
        engine_port=_port(*settings.engine_address) if settings.engine_address[1] else None,
        shared_memory=_shared_memory(),
        ray=ray_version(),
        prefixes=None if prefixes is None else read_disk(prefixes),
        prefix_bytes=0 if prefixes is None else _bytes_below(prefixes),
    )


def _bytes_below(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk; those that go meanwhile count or do not."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
    return total


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


def _shared_memory() -> int:
    try:
        usage = os.statvfs("/dev/shm")  # noqa: S108 - where Ray keeps its objects
    except OSError:
        return 0
    return usage.f_bavail * usage.f_frsize


def _secrets(settings: Settings) -> list[SecretFile]:
    found = []
    paths = [*(settings.data_dir / name for name in _SECRETS), engine_token_path(settings)]
    if settings.kv_disk and (key_file := kv_disk(settings.kv_disk).key_file):
        paths.append(Path(key_file))
    for path in paths:
        try:
            status = path.lstat()
        except OSError:
            continue
        found.append(SecretFile(path, stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()))
    return found
