"""`loraplex restore` writes nothing where the backup is cut, altered, hostile or of something else."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.store.files import TENSORS_NAME
from loraplex.app.backup.errors import BackupRefused
from loraplex.app.backup.restore import restore_backup
from loraplex.migrations.errors import DatabaseTooNew
from support.control.backup import Installation, Machine, manifest_of


def tree(root: Path) -> set[Path]:
    return set(root.rglob("*")) if root.exists() else set()


def reseal(backup: Path, **changes: Any) -> None:
    """A manifest that a forger made: its own digest is right."""
    content = json.loads((backup / "manifest.json").read_text()) | changes
    del content["sha256"]
    sealed = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (backup / "manifest.json").write_text(
        json.dumps(content | {"sha256": hashlib.sha256(sealed).hexdigest()})
    )


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.chmod(0o600)
    path.unlink()  # it may be a link to the store's own file
    path.write_bytes(content)


def tensors(backup: Path) -> Path:
    return next(backup.rglob(TENSORS_NAME))


def link_elsewhere(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def rename_journal(backup: Path, name: str) -> None:
    files = manifest_of(backup)["files"]
    secret = files.pop("admin-token")
    reseal(backup, files=files | {name: secret})


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda b: (b / "manifest.json").unlink(), "cut short"),
    "cut manifest": (lambda b: os.truncate(b / "manifest.json", 300), "no JSON"),
    "changed manifest": (
        lambda b: (b / "manifest.json").write_text((b / "manifest.json").read_text().replace("Z", "z")),
        "was altered",
    ),
    "another format": (lambda b: reseal(b, format=1), "format '1'"),
    "a list": (lambda b: (b / "manifest.json").write_text("[]"), "no manifest"),
    "unknown part": (lambda b: reseal(b, more=1), "more"),
    "database": (lambda b: flip(next(b.glob("loraplex.*"))), "altered or cut"),
    "cut database": (lambda b: os.truncate(next(b.glob("loraplex.*")), 4096), "altered or cut"),
    "tensors": (lambda b: flip(tensors(b)), "was altered"),
    "no tensors": (lambda b: tensors(b).unlink(), "cannot be read"),
    "token": (lambda b: flip(b / "admin-token"), "altered or cut"),
    "another pepper": (lambda b: (b / "key-pepper").write_text("ab" * 32), "not the pepper"),
    "linked file": (lambda b: link_elsewhere(b / "admin-token"), "cannot be read"),
    "linked folder": (lambda b: link_elsewhere(tensors(b).parent), "cannot be read"),
    "linked store": (lambda b: link_elsewhere(b / "artifacts"), "cannot be read"),
    "path upwards": (lambda b: rename_journal(b, "../evil"), "no backup has"),
    "absolute path": (lambda b: rename_journal(b, "/tmp/evil"), "no backup has"),
    "path within usage": (lambda b: rename_journal(b, "usage/../../0000000001.segment"), "no backup has"),
    "hostile digest": (
        lambda b: reseal(b, artifacts=manifest_of(b)["artifacts"] | {"digests": ["../" * 20 + "etc"]}),
        "digests",
    ),
}


@pytest.mark.parametrize(
    ("backend", "damage"),
    [*(("sqlite", damage) for damage in DAMAGE), ("postgresql", "database"), ("postgresql", "cut database")],
    indirect=["backend"],
)
def test_what_is_no_whole_backup_is_refused(
    backup: Path, machine: Machine, damage: str, tmp_path: Path
) -> None:
    change, expected = DAMAGE[damage]
    change(backup)
    before = tree(tmp_path)
    with pytest.raises(BackupRefused, match=expected):
        restore_backup(machine.settings, backup)
    assert tree(tmp_path) == before


def test_a_backup_of_a_newer_version_is_refused(backup: Path, machine: Machine) -> None:
    reseal(backup, database=manifest_of(backup)["database"] | {"schema": "0999"})
    with pytest.raises(DatabaseTooNew, match="0999"):
        restore_backup(machine.settings, backup)
    assert not machine.root.exists()


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_a_version_without_bytes_is_refused(backup: Path, machine: Machine) -> None:
    """A forged manifest that does not name what the database does."""
    parts = manifest_of(backup)["artifacts"]
    reseal(backup, artifacts=parts | {"digests": parts["digests"][1:], "count": 1})
    with pytest.raises(BackupRefused, match="the backup does not have it"):
        restore_backup(machine.settings, backup)
    assert not machine.root.exists()


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_another_database_is_refused(backup: Path, machine: Machine) -> None:
    (backup / "loraplex.db").unlink()
    with closing(sqlite3.connect(backup / "loraplex.db")) as other:
        other.execute("CREATE TABLE recipes (title)")
        other.commit()
    content = (backup / "loraplex.db").read_bytes()
    part = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    reseal(backup, files=manifest_of(backup)["files"] | {"loraplex.db": part})
    with pytest.raises(BackupRefused, match="no database of Loraplex"):
        restore_backup(machine.settings, backup)


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
def test_a_backup_without_the_database_is_refused(
    used: Installation, machine: Machine, tmp_path: Path
) -> None:
    backup = used.backup()
    files = manifest_of(backup)["files"]
    del files["loraplex.dump"]
    reseal(backup, files=files, database=manifest_of(backup)["database"] | {"file": None})
    with pytest.raises(BackupRefused, match="has no database"):
        restore_backup(machine.settings, backup)
