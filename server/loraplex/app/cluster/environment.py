"""The environment of Ray's processes, and the folder below which they keep everything."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "TMPDIR"
"""The variable by which each process of one Ray is known, even when its parent has ended."""
KEPT = frozenset({"LORAPLEX_MODEL_CACHE"})
"""Our variables that engines read. Settings are passed on by the spec, and secrets of the server not at all."""
START_S = "90"
"""Time for each part of a Ray of our own to start."""
GONE_S = 5.0
LOOK_S = 0.05
REMOVALS = 5
"""Times that a folder is removed: a process that ends may still write, and one between fork and exec is not seen."""


def ray_environment(base: Mapping[str, str], folder: Path, *, token: str | None) -> dict[str, str]:
    """Environment for a manager and all that Ray starts. `token` is that of a Ray of our own, on loopback; None: it
    joins a running cluster, whose own environment says how."""
    kept = {name: value for name, value in base.items() if not name.startswith("LORAPLEX_") or name in KEPT}
    ours = {
        MARK: str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
        # Ray runs its workers at 15, and an engine is a child of one.
        "RAY_worker_niceness": "0",
        # Engines serve on for so long without a head.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        # Else the autoscaler hears of a load after 10 s.
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    }
    if token is not None:
        ours |= {
            # By its name for other systems; on Linux it makes every port one of 127.0.0.1.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            # It would kill an engine when the machine's memory is nearly used, which is what a KV cache is for.
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
            # Each is 30 s, and a busy machine may need more. A Ray that gives up is begun from the start.
            "RAY_gcs_server_port_wait_time_s": START_S,
            "RAY_raylet_start_wait_time_s": START_S,
            "RAY_agent_register_timeout_ms": f"{START_S}000",
            "RAY_TMPDIR": str(folder),
        }
    return kept | ours


def new_token() -> str:
    return secrets.token_hex(32)


def make_ray_folder() -> Path:
    """A fresh folder of mode 0700 with a path that leaves room for Ray's sockets. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix="lp-ray-", dir="/tmp"))


def remove_ray_folder(folder: Path) -> None:
    """Remove it, and end what still runs below it. Takes seconds where that does not go."""
    for _ in range(REMOVALS):
        end_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(LOOK_S)
        if not folder.exists():
            return


def processes_of(folder: Path) -> list[int]:
    """Processes of the Ray below this folder, zombies and this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if _has_mark(entry, folder) or _has_file_in(entry, folder):
                    found.append(int(entry.name))
    return found


def _has_mark(process: Path, folder: Path) -> bool:
    return os.fsencode(f"{MARK}={folder}") in (process / "environ").read_bytes().split(b"\0")


def _has_file_in(process: Path, folder: Path) -> bool:
    """Whether a file below the folder is open. Ray renames its agents, which overwrites their environment; their logs
    are there."""
    return any(file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())


def end_processes(folder: Path) -> int:
    """Kill what is left of a Ray whose manager has ended; returns how many there were."""
    left = processes_of(folder)
    end = time.monotonic() + GONE_S
    alive = left
    while alive and time.monotonic() < end:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
        alive = processes_of(folder)
    return len(left)
