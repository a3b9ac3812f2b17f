"""A data directory to back up, and a server's first moments on a backup of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from loraplex.adapters.store.files import TENSORS_NAME
from loraplex.app.backup.run import make_backup
from loraplex.app.settings import Settings
from loraplex.control.tenancy.pepper import check_pepper
from support.control.plane import use_database
from support.http.admin_plane import AdminPlane
from support.servers.postgres import find_programs, postgres_server


@dataclass
class Installation:
    """A data directory in use, and the settings of its server."""

    plane: AdminPlane
    settings: Settings
    key: str

    def backup(self, name: str = "backup", **options: Any) -> Path:
        directory = self.plane.root.parent / name
        make_backup(self.settings, directory, **options)
        return directory

    def damage(self, version: str = "v1") -> str:
        """A byte of its tensors; the digest."""
        info = self.plane.services.catalog.get_version("acme", "support", version)
        path = self.plane.services.artifacts.store.path(info.digest) / TENSORS_NAME
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return info.digest


@dataclass
class Machine:
    """An empty data directory, and an empty database where the backup is of PostgreSQL."""

    root: Path
    settings: Settings

    @property
    def options(self) -> list[str]:
        return ["--data-dir", str(self.root), "--database-url", self.settings.database_url]

    def plane(self) -> AdminPlane:
        """A server's first moments on it."""
        use_database(self.root, self.settings.database_url)
        plane = AdminPlane(self.root)
        check_pepper(plane.database, bytes.fromhex((self.root / "key-pepper").read_text().strip()))
        plane.start()
        return plane


def empty_machine(backend: str, tmp_path: Path, name: str = "machine") -> Machine:
    root = tmp_path / name
    url = postgres_server().create_database() if backend == "postgresql" else f"sqlite:///{root}/loraplex.db"
    return Machine(root, Settings(data_dir=root, database_url=url, model="none"))


def restored(backup: Path) -> AdminPlane:
    """A server's first moments on a copy of a backup."""
    root = backup.with_name(f"restored-from-{backup.name}")
    shutil.copytree(backup, root)
    dump = root / "loraplex.dump"
    if dump.exists():
        url = postgres_server().create_database()
        parsed = make_url(url)
        target = f"postgresql://{parsed.username}@{parsed.host}:{parsed.port}/{parsed.database}"
        programs = find_programs()
        assert programs is not None
        command = [programs / "pg_restore", "--no-owner", "--exit-on-error", f"--dbname={target}", dump]
        subprocess.run(command, check=True, capture_output=True)
        use_database(root, url)
    else:
        (root / "loraplex.db").rename(root / "control.db")
    plane = AdminPlane(root)
    check_pepper(plane.database, bytes.fromhex((root / "key-pepper").read_text().strip()))
    plane.start()
    return plane


def checked(plane: AdminPlane) -> None:
    """What is named is there, and nothing else; the audit log is whole."""
    plane.check_integrity()
    plane.close()


def states(plane: AdminPlane) -> dict[str, str]:
    return {
        info.version: info.state for info in plane.services.catalog.list_versions("acme", "support").items
    }


def manifest_of(backup: Path) -> Any:
    return json.loads((backup / "manifest.json").read_text())
