"""The lock of a data directory: one process at a time uses it."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from loraplex.app.settings import SettingsInvalid


def make_data_dir(path: Path) -> None:
    """Make a folder for the server's user alone. Raises SettingsInvalid."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsInvalid(
            f"the data directory {path} cannot be used ({error.strerror}); choose another with --data-dir."
        ) from error


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Held while the file is open: one process at a time uses a data directory, which is made if need be. Raises
    SettingsInvalid."""
    make_data_dir(data_dir)
    try:
        handle = open(data_dir / "lock", "w")  # noqa: SIM115 - held as long as the server lives
    except OSError as error:
        raise SettingsInvalid(
            f"the data directory {data_dir} cannot be used ({error.strerror}); choose another with --data-dir."
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise SettingsInvalid(
            f"another server uses the data directory {data_dir}; stop it, or choose another with --data-dir."
        ) from error
    return handle


def is_data_dir_locked(data_dir: Path) -> bool:
    """Whether another process uses it. Nothing is written."""
    try:
        with open(data_dir / "lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
