"""`loraplex doctor`: what this machine, these settings and this data directory are fit for."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loraplex.adapters.base import load_base_spec
from loraplex.adapters.errors import LoraplexError
from loraplex.app.database import describe_database
from loraplex.app.models import ensure_model
from loraplex.app.redis import describe_redis
from loraplex.app.settings import Settings

_PROBE = (
    "import torch, transformers; "
    "print(torch.__version__, transformers.__version__, "
    "torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu', "
    "torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
)
_KERNELS = """
import sys
from loraplex.engine.kernel_report import describe_kernels
from loraplex.adapters.errors import LoraplexError
try:
    print(describe_kernels(sys.argv[1], sys.argv[2], int(sys.argv[3])))
except LoraplexError as error:
    sys.exit(error.message)
"""
_EXAMINE = """
import sys
from pathlib import Path
from loraplex.adapters.errors import LoraplexError
from loraplex.engine.factory import resolve_kernels
from loraplex.engine.model.loading import examine_dtype, examine_model
try:
    print(examine_model(Path(sys.argv[1]), int(sys.argv[2])))
    device, _ = resolve_kernels(sys.argv[3], "torch")
    print(examine_dtype(Path(sys.argv[1]), sys.argv[4], device))
except LoraplexError as error:
    sys.exit(error.message)
"""


def examine(settings: Settings, console: Console) -> int:
    """Print one line a check; 1 if any failed."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"),
        ("torch", _torch),
        ("kernels", lambda: _kernels(settings)),
        ("database", lambda: describe_database(settings)),
        ("redis", lambda: describe_redis(settings)),
        ("data directory", lambda: _data_dir(settings.data_dir)),
        ("data port", lambda: _port(settings.host, settings.port)),
        ("admin port", lambda: _port(settings.admin_host, settings.admin_port)),
    ]
    if settings.model:
        checks.append(("base model", lambda: _model(settings)))
    failed = 0
    for name, check in checks:
        try:
            console.print(f"[green]ok[/]    {name}: {check()}", highlight=False, soft_wrap=True)
        except (LoraplexError, OSError, subprocess.SubprocessError) as error:
            failed += 1
            console.print(f"[red]wrong[/] {name}: {error}", highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _torch() -> str:
    torch, transformers, device, *capability, threads = _own_process(_PROBE).split()
    return (
        f"{torch}, transformers {transformers}, device {device} ({' '.join(capability)}), {threads} threads"
    )


def _kernels(settings: Settings) -> str:
    return _own_process(_KERNELS, settings.kernels, settings.device, str(settings.threads))


def _data_dir(path: Path) -> str:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OSError(f"{existing} is not a directory that can be written; choose another with --data-dir")
    free = shutil.disk_usage(existing).free
    if free < 1 << 30:
        raise OSError(f"only {free >> 20} MiB free at {existing}; at least 1 GiB is wanted")
    held = ", in use by a running server" if _is_held(path) else ""
    return f"{path}, {free >> 30} GiB free{held}"


def _is_held(data_dir: Path) -> bool:
    try:
        with open(data_dir / "lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _port(host: str, port: int) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"{host}:{port} cannot be used: {error.strerror}") from error
    return f"{host}:{port} is free"


def _model(settings: Settings) -> str:
    model_dir = ensure_model(settings.model)
    given = (str(model_dir), str(settings.max_model_len), settings.device, settings.dtype)
    kind, dtype = _own_process(_EXAMINE, *given).splitlines()
    base = load_base_spec(model_dir, cache_dir=settings.data_dir)
    return f"{kind}, {dtype}, {base.num_layers} layers, {len(base.sites)} sites, {base.fingerprint[:12]}"


def _own_process(program: str, *arguments: str) -> str:
    """What a program that needs torch prints: importing torch here would cost this process its memory."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and a fixed text
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise OSError((done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1])
    return done.stdout.strip()
