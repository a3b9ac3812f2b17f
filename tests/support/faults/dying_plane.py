"""A control plane that is killed between its steps; for a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from support.control.plane import ControlPlane


def die_at(root: Path, point: str, tenant: str, name: str) -> None:
    """An upload or a deletion that is killed at a point."""
    plane = ControlPlane(root)

    def kill(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    store: Any = plane.store
    if point == "before commit":
        store.commit = kill
        plane.add(tenant, name, seed=5)
    elif point == "between commit and row":
        real = store.commit

        def commit_and_die(*args: Any) -> None:
            real(*args)
            kill()

        store.commit = commit_and_die
        plane.add(tenant, name, seed=5)
    elif point == "between row and bytes of a deletion":
        store.delete = kill
        plane.catalog.delete_adapter(tenant, name)
    raise AssertionError("it should be dead")
