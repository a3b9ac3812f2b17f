"""A real file system that can be filled."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class SmallDisk:
    """A mounted tmpfs. `leave` fills it up to some bytes; `empty` takes the filling away."""

    root: Path

    @property
    def free(self) -> int:
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    @property
    def _ballast(self) -> Path:
        return self.root / "ballast"

    def leave(self, num_bytes: int) -> None:
        self.empty()
        assert self.free > num_bytes, "the disk is too small for this test"
        with open(self._ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - num_bytes)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(mount_point: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Skips the test where nothing may be mounted."""
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(mount_point)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount program here")
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here, which takes root: {done.stderr.strip()}")
    try:
        yield SmallDisk(mount_point)
    finally:
        # Lazily: a server may still be on its way out.
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)
