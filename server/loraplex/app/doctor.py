"""`loraplex doctor`: what this machine, these settings and this data directory are fit for."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from loraplex.adapters.base import load_base_spec
from loraplex.adapters.errors import LoraplexError
from loraplex.app.commands.output import Output
from loraplex.app.database import describe_database
from loraplex.app.doctor_torch import Answers, Questions
from loraplex.app.models import ensure_model
from loraplex.app.redis import describe_redis
from loraplex.app.settings import Settings


def examine(settings: Settings, out: Output) -> int:
    """Print one line a check; 1 if any failed."""
    model = _Model(settings)
    torch = Answers(
        Questions(
            device=settings.device,
            dtype=settings.dtype,
            kernels=settings.kernels,
            threads=settings.threads,
            max_model_len=settings.max_model_len,
            model_dir=None if model.directory is None else str(model.directory),
        )
    )
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"),
        ("torch", lambda: torch["torch"]),
        ("kernels", lambda: torch["kernels"]),
        ("database", lambda: describe_database(settings)),
        ("redis", lambda: describe_redis(settings)),
        ("data directory", lambda: _data_dir(settings.data_dir)),
        ("data port", lambda: _port(settings.host, settings.port, settings.data_dir)),
        ("admin port", lambda: _port(settings.admin_host, settings.admin_port, settings.data_dir)),
    ]
    if settings.model:
        checks.append(("base model", lambda: model.describe(torch)))
    console = Console()
    results: list[dict[str, Any]] = []
    for name, check in checks:
        try:
            found, is_ok = check(), True
        except (LoraplexError, OSError) as error:
            found, is_ok = str(error), False
        results.append({"name": name, "ok": is_ok, "detail": found})
        if not out.as_json:
            mark = "[green]ok[/]   " if is_ok else "[red]wrong[/]"
            console.print(f"{mark} {name}: {escape(found)}", highlight=False, soft_wrap=True)
    all_ok = all(result["ok"] for result in results)
    if out.as_json:
        out.json({"ok": all_ok, "checks": results})
    return 0 if all_ok else 1


class _Model:
    """The base model of the settings, fetched if need be; why it cannot be had is told by `describe`."""

    def __init__(self, settings: Settings) -> None:
        self._data_dir = settings.data_dir
        self.directory: Path | None = None
        self._failure: Exception | None = None
        if settings.model:
            try:
                self.directory = ensure_model(settings.model)
            except (LoraplexError, OSError) as error:
                self._failure = error

    def describe(self, torch: Answers) -> str:
        if self._failure is not None:
            raise self._failure
        assert self.directory is not None
        how = torch["model"]
        base = load_base_spec(self.directory, cache_dir=self._data_dir)
        return f"{how}, {base.num_layers} layers, {len(base.sites)} sites, {base.fingerprint[:12]}"


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


def _port(host: str, port: int, data_dir: Path) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and _is_held(data_dir):
                return f"{host}:{port} is in use, and so is the data directory: a server runs"
            raise OSError(f"{host}:{port} cannot be used: {error.strerror}") from error
    return f"{host}:{port} is free"
