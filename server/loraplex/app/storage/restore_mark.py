"""The mark of a restore that has begun and has not ended: no server starts on its data directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from loraplex.adapters.store.files import create_file, write_all
from loraplex.app.settings import SettingsInvalid
from loraplex.control.usage.segments import sync_directory

RESTORE_MARK = "restore-unfinished.json"


def set_restore_mark(data_dir: Path, backup_id: str) -> None:
    """On the disk when this returns. Raises OSError."""
    with create_file(data_dir / RESTORE_MARK) as file:
        write_all(file, json.dumps({"backup": backup_id}).encode() + b"\n")
        os.fsync(file.fileno())
    sync_directory(data_dir)


def restore_mark(data_dir: Path) -> str | None:
    """The id of the backup whose restore did not end; "" where the mark was cut by a crash; None without a mark."""
    try:
        found = json.loads((data_dir / RESTORE_MARK).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return ""
    return str(found.get("backup", "")) if isinstance(found, dict) else ""


def remove_restore_mark(data_dir: Path) -> None:
    """Raises OSError."""
    (data_dir / RESTORE_MARK).unlink()
    sync_directory(data_dir)


def refuse_unfinished_restore(data_dir: Path) -> None:
    """Raises SettingsInvalid."""
    if restore_mark(data_dir) is not None:
        raise SettingsInvalid(
            f"a restore into {data_dir} has not ended: run the same 'loraplex restore' again, or give another "
            "--data-dir."
        )
