"""`loraplex restore`: an empty machine becomes the backed-up one, or nothing is written."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url, select

from loraplex.adapters.store.files import TENSORS_NAME
from loraplex.app.backup.errors import BackupRefused, RestoreFailed
from loraplex.app.backup.restore import restore_backup
from loraplex.app.backup.run import make_backup
from loraplex.app.settings import Settings, SettingsInvalid
from loraplex.app.storage.restore_mark import RESTORE_MARK, refuse_unfinished_restore
from loraplex.control.db.tables import Budget
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.writer import UsageWriter
from support.control.backup import Installation, Machine, checked, empty_machine, manifest_of, states
from support.control.usage import accepted, ended, rows_of
from support.faults.small_disk import small_disk
from support.http.admin_plane import PEPPER, AdminPlane
from support.servers.live_server import clean_environment
from support.servers.run_here import run_here


def test_an_empty_machine_has_everything(used: Installation, machine: Machine) -> None:
    plane = used.plane
    targets = [ReleaseTarget("v1", 90), ReleaseTarget("v2", 10)]
    plane.services.releases.put("acme", "support", targets)
    release = plane.services.releases.get("acme", "support")
    rows = asyncio.run(write_usage(plane))
    with plane.database.write() as session:
        session.add(
            Budget(
                owner_kind="tenant",
                owner_id="acme",
                period="month",
                starts_at=datetime(2026, 11, 1, tzinfo=UTC),
                tenant_id="acme",
                spent=4711,
            )
        )
    backup = used.backup()
    told = run_here("restore", str(backup), *machine.options)
    assert told.code == 0, told.stderr
    assert "artifacts: 2" in told.stdout
    assert f"{machine.root} is restored" in told.stdout
    assert not (machine.root / RESTORE_MARK).exists()
    verified = run_here("audit", "verify", *machine.options)
    assert verified.code == 0, verified.stderr
    assert "anchor" in told.stdout
    assert verified.stdout.splitlines()[-1] in told.stdout
    plane = machine.plane()
    with plane.database.read() as session:
        assert session.scalars(select(Budget.spent)).all() == [4711]
    assert states(plane) == {"v1": "ready", "v2": "ready", "v3": "deleted"}
    assert plane.services.releases.get("acme", "support") == release
    principal = asyncio.run(plane.services.key_cache.authenticate(used.key))
    assert principal.tenant_id == "acme"
    assert (machine.root / "admin-token").read_text() == (used.plane.root / "admin-token").read_text()
    drain_usage(plane)
    assert rows_of(plane.database) == {row.id: row for row in rows}
    checked(plane)


async def write_usage(plane: AdminPlane) -> list[Any]:
    """Some of it in the database, the rest in the journal."""
    journal = UsageJournal(plane.root / "usage")
    writer = UsageWriter(plane.database, plane.root / "usage", journal)
    rows = [ended() for _ in range(6)]
    for part in (rows[:4], rows[4:]):
        for row in part:
            journal.accept(accepted(id=row.id))
        await asyncio.gather(*(journal.end(row) for row in part))
        if part == rows[:4]:
            while writer.write_some():
                pass
    writer.close()
    journal.close()
    return rows


def drain_usage(plane: AdminPlane) -> None:
    journal = UsageJournal(plane.root / "usage")
    writer = UsageWriter(plane.database, plane.root / "usage", journal)
    while writer.write_some():
        pass
    writer.close()
    journal.close()


class Program:
    """`loraplex restore` in a process of its own, which kills itself when it begins a stage."""

    CODE = (
        "import os, signal, sys; from pathlib import Path\n"
        "from loraplex.app.backup.restore import restore_backup; from loraplex.app.settings import Settings\n"
        "backup, data, url, stage = sys.argv[1:]\n"
        "die = lambda found: found == stage and os.kill(os.getpid(), signal.SIGKILL)\n"
        "restore_backup(Settings(data_dir=Path(data), database_url=url, model='none'), Path(backup), on_stage=die)\n"
    )

    def __init__(self, backup: Path, machine: Machine) -> None:
        self._arguments = [str(backup), str(machine.root), machine.settings.database_url]

    def killed_at(self, stage: str) -> None:
        command = [sys.executable, "-c", self.CODE, *self._arguments, stage]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.slow
def test_a_killed_restore_is_told_and_repeated(used: Installation, backup: Path, machine: Machine) -> None:
    """Killed again and again, each time a little later, in the same places."""
    program = Program(backup, machine)
    program.killed_at("check")
    assert not machine.root.exists()
    for stage in ("artifacts", "files", "database", "end"):
        program.killed_at(stage)
        assert (machine.root / RESTORE_MARK).exists()
        with pytest.raises(SettingsInvalid, match="has not ended"):
            refuse_unfinished_restore(machine.root)
    refused = run_here("serve", "--model", str(used.plane.root), *machine.options)
    assert (refused.code, refused.stdout) == (1, "")
    assert "run the same 'loraplex restore' again" in refused.stderr
    used.plane.make_adapter(seed=9)
    with pytest.raises(RestoreFailed, match="unfinished restore of another backup"):
        restore_backup(machine.settings, used.backup("later"))
    restore_backup(machine.settings, backup)
    plane = machine.plane()
    assert states(plane) == {"v1": "ready", "v2": "ready", "v3": "deleted"}
    checked(plane)


def test_what_is_there_is_never_written_over(used: Installation, backup: Path, machine: Machine) -> None:
    machine.root.mkdir()
    (machine.root / "mine").write_text("kept")
    for _ in range(2):
        with pytest.raises(RestoreFailed, match=r"is not empty.*Nothing was written"):
            restore_backup(machine.settings, backup)
    assert [path.name for path in machine.root.iterdir()] == ["mine"]
    with pytest.raises(RestoreFailed, match="is not empty"):  # the installation itself
        restore_backup(used.settings, backup)
    assert states(used.plane)["v2"] == "ready"


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestOnSqlite:
    def test_the_other_kind_of_database_is_refused(self, backup: Path, tmp_path: Path) -> None:
        settings = Settings(
            data_dir=tmp_path / "other", database_url="postgresql://nobody@127.0.0.1:1/none", model="none"
        )
        with pytest.raises(BackupRefused, match="leave it out"):
            restore_backup(settings, backup)

    def test_default_database_and_another_store(
        self, used: Installation, backup: Path, tmp_path: Path
    ) -> None:
        root, store = tmp_path / "machine", tmp_path / "shared" / "store"
        settings = Settings(data_dir=root, artifact_url=f"file://{store}", model="none")
        restore_backup(settings, backup)
        assert len(list(store.rglob(TENSORS_NAME))) == 2
        assert not (root / "artifacts").exists()
        assert (root / "loraplex.db").stat().st_mode & 0o777 == 0o600
        # A backup of what was restored holds the same.
        again = make_backup(settings, tmp_path / "again")
        assert again["artifacts"] == manifest_of(backup)["artifacts"]
        assert again["database"] == manifest_of(backup)["database"]
        with pytest.raises(RestoreFailed, match="store/sha256 is not empty"):
            restore_backup(settings.model_copy(update={"data_dir": tmp_path / "second"}), backup)

    def test_a_disk_that_is_too_small(self, backup: Path, machine: Machine, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 64 << 10) as disk:
            settings = Settings(data_dir=disk.root / "data", model="none")
            with pytest.raises(RestoreFailed, match=r"MiB free.*Nothing was written"):
                restore_backup(settings, backup)
            assert list(disk.root.iterdir()) == []

    def test_a_disk_that_fails_meanwhile(
        self, backup: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(errno.EIO, "input/output error", "disk")

        with monkeypatch.context() as broken:
            broken.setattr("loraplex.app.backup.restore.write_all", fail)
            with pytest.raises(RestoreFailed, match="run the same command again"):
                restore_backup(machine.settings, backup)
        restore_backup(machine.settings, backup)
        checked(machine.plane())

    def test_a_running_server_keeps_its_directory(
        self, used: Installation, backup: Path, machine: Machine
    ) -> None:
        """A mark that was cut by a crash, and a server that holds the lock."""
        machine.root.mkdir()
        (machine.root / RESTORE_MARK).touch()
        restore_backup(machine.settings, backup)
        checked(machine.plane())

    def test_two_restores_at_once(self, backup: Path, machine: Machine) -> None:
        machine.root.mkdir()
        with open(machine.root / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(SettingsInvalid, match="another server uses"):
                restore_backup(machine.settings, backup)
        assert [path.name for path in machine.root.iterdir()] == ["lock"]

    def test_as_json(self, backup: Path, machine: Machine) -> None:
        told = run_here("restore", str(backup), *machine.options, "--json")
        shown = json.loads(told.stdout)
        assert shown["backup"] == manifest_of(backup)["sha256"]
        assert (shown["artifacts"], shown["schema"], shown["notes"]) == (2, "0020", [])
        again = run_here("restore", str(backup), *machine.options, "--json")
        assert (again.code, json.loads(again.stdout)["error"]["code"]) == (1, "restore_failed")

    def test_without_the_pepper_it_is_told(self, used: Installation, tmp_path: Path) -> None:
        (used.plane.root / "key-pepper").unlink()
        settings = used.settings.model_copy(update={"key_pepper": PEPPER.hex()})
        make_backup(settings, tmp_path / "given")
        machine = empty_machine("sqlite", tmp_path)
        (note,) = restore_backup(machine.settings, tmp_path / "given").notes
        assert "--key-pepper" in note
        other = empty_machine("sqlite", tmp_path, "other")
        wrong = other.settings.model_copy(update={"key_pepper": "ab" * 32})
        with pytest.raises(BackupRefused, match="--key-pepper is not the pepper"):
            restore_backup(wrong, tmp_path / "given")


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
class TestOnPostgres:
    def test_a_database_in_use_is_refused(self, backup: Path, machine: Machine) -> None:
        parsed = make_url(machine.settings.database_url)
        plain = parsed.set(drivername="postgresql").render_as_string()
        with psycopg.connect(plain) as connection:
            connection.execute("CREATE TABLE recipes (title text)")
        with pytest.raises(RestoreFailed, match="is not empty: create a new one"):
            restore_backup(machine.settings, backup)
        assert not machine.root.exists()

    def test_a_database_that_was_filled_meanwhile(self, backup: Path, machine: Machine) -> None:
        def fill(stage: str) -> None:
            if stage == "database":
                plain = (
                    make_url(machine.settings.database_url).set(drivername="postgresql").render_as_string()
                )
                with psycopg.connect(plain) as connection:
                    connection.execute("CREATE TABLE recipes (title text)")

        with pytest.raises(RestoreFailed, match="holds something else by now"):
            restore_backup(machine.settings, backup, on_stage=fill)
        assert (machine.root / RESTORE_MARK).exists()

    def test_sqlite_is_refused(self, backup: Path, tmp_path: Path) -> None:
        with pytest.raises(BackupRefused, match="new, empty database"):
            restore_backup(Settings(data_dir=tmp_path / "m", model="none"), backup)

    def test_pg_restore_is_needed_and_its_failure_told(
        self, backup: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as bare:
            bare.setenv("PATH", "/nowhere")
            with pytest.raises(RestoreFailed, match=r"pg_restore is not installed.*Nothing was written"):
                restore_backup(machine.settings, backup)
        assert not machine.root.exists()
        program = tmp_path / "bin" / "pg_restore"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\necho "no such server" >&2\nexit 1\n')
        program.chmod(0o755)
        with monkeypatch.context() as failing:
            failing.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
            with pytest.raises(RestoreFailed, match=r"no such server.*run the same command again"):
                restore_backup(machine.settings, backup)
        restore_backup(machine.settings, backup)
        checked(machine.plane())
