"""`loraplex backup`: a folder that a new data directory can be made of, whatever happens while it is made."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from typer.testing import CliRunner

from loraplex.adapters.store.files import TENSORS_NAME
from loraplex.app.backup.errors import BackupFailed, BackupIncomplete
from loraplex.app.backup.run import make_backup
from loraplex.app.cli import create_cli
from loraplex.app.settings import Settings
from loraplex.control.usage.journal import UsageJournal
from loraplex.control.usage.records import INTERRUPTED
from loraplex.control.usage.writer import UsageWriter
from loraplex.migrations.run import upgrade
from support.control.backup import Installation, checked, manifest_of, restored, states
from support.control.usage import accepted, ended, rows_of
from support.faults.small_disk import small_disk
from support.http.admin_plane import PEPPER, AdminPlane


def test_server_starts_from_a_backup(used: Installation) -> None:
    backup = used.backup()
    manifest = manifest_of(backup)
    assert manifest["artifacts"]["count"] == 2
    assert manifest["artifacts"]["corrupt"] == manifest["artifacts"]["damaged"] == []
    assert manifest["database"]["schema"] == "0020"
    assert manifest["secrets"] == {"key-pepper": "key-pepper", "admin-token": "admin-token"}
    plane = restored(backup)
    assert states(plane) == {"v1": "ready", "v2": "ready", "v3": "deleted"}
    principal = asyncio.run(plane.services.key_cache.authenticate(used.key))
    assert principal.tenant_id == "acme"
    plane.make_adapter(seed=4)
    assert states(plane)["v4"] == "ready"
    checked(plane)


def test_backup_is_readable_by_its_owner_alone(used: Installation) -> None:
    old = os.umask(0)
    try:
        backup = used.backup()
    finally:
        os.umask(old)
    for path in (backup, *backup.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_uploads_and_deletions_meanwhile_leave_no_hole(used: Installation) -> None:
    """v4 comes after most artifacts were copied, and goes after the database was, which names it."""
    catalog, stages = used.plane.services.catalog, []

    def on_stage(stage: str) -> None:
        stages.append(stage)
        if stages == ["artifacts", "usage journal"]:
            used.plane.make_adapter(seed=4)
            catalog.delete_version("acme", "support", "v2")
        if stages[-1] == "the last artifacts" and stages.count("database") == 1:
            catalog.delete_version("acme", "support", "v4")
            used.plane.make_adapter(seed=5)

    backup = used.backup(on_stage=on_stage)
    assert stages.count("database") == 2
    plane = restored(backup)
    assert states(plane) == {"v1": "ready", "v2": "deleted", "v3": "deleted", "v4": "deleted", "v5": "ready"}
    assert manifest_of(backup)["artifacts"]["count"] == 2
    checked(plane)


def test_bytes_that_the_store_lost_are_named(used: Installation) -> None:
    digest = used.damage()
    with pytest.raises(BackupIncomplete) as caught:
        used.backup()
    assert any(digest in line for line in caught.value.details)
    backup = used.plane.root.parent / "backup"
    assert manifest_of(backup)["artifacts"]["damaged"] == [digest]
    plane = restored(backup)
    assert states(plane)["v1"] == "corrupt"
    assert states(plane)["v2"] == "ready"
    checked(plane)


def test_known_corrupt_version_does_not_fail_the_backup(used: Installation) -> None:
    digest = used.damage()
    used.plane.services.catalog.mark_damaged(digest)
    assert manifest_of(used.backup())["artifacts"]["corrupt"] == [digest]


class TestUsage:
    """Usage that ended before the backup is in what is restored of it, once."""

    def test_backup_of_a_running_server_has_its_usage(self, used: Installation) -> None:
        database, usage = used.plane.database, used.plane.root / "usage"
        journal = UsageJournal(usage)
        writer = UsageWriter(database, usage, journal)
        told, waiting, running = [ended() for _ in range(5)], [ended() for _ in range(3)], accepted()
        asyncio.run(self.put(journal, told))
        while writer.write_some():
            pass
        # An accepted request is written before the ends that come after it, and those are waited for.
        journal.accept(running)
        asyncio.run(self.put(journal, waiting))
        assert len(rows_of(database)) == 5
        backup = used.backup()
        plane = restored(backup)
        found = self.adopted(plane)
        assert {row.id for row in told + waiting} | {running.id} == set(found)
        assert found[running.id].status == INTERRUPTED
        assert all(found[row.id] == row for row in told + waiting)
        assert len(rows_of(database)) == 5  # the server that runs goes on as before
        while writer.write_some():
            pass
        assert len(rows_of(database)) == 8
        journal.close()
        writer.close()

    def test_usage_written_between_the_two_copies_is_kept_once(self, used: Installation) -> None:
        database, usage = used.plane.database, used.plane.root / "usage"
        journal = UsageJournal(usage, segment_bytes=64 << 10)
        writer = UsageWriter(database, usage, journal)
        rows = [ended() for _ in range(400)]
        for start in range(0, len(rows), 20):
            asyncio.run(self.put(journal, rows[start : start + 20]))

        def on_stage(stage: str) -> None:
            if stage == "database":
                while writer.write_some():
                    pass

        found = self.adopted(restored(used.backup(on_stage=on_stage)))
        assert sorted(found) == sorted(row.id for row in rows)
        assert all(found[row.id] == row for row in rows)
        journal.close()
        writer.close()

    @staticmethod
    async def put(journal: UsageJournal, rows: list[Any]) -> None:
        for row in rows:
            journal.accept(accepted(id=row.id))
        await asyncio.gather(*(journal.end(row) for row in rows))

    @staticmethod
    def adopted(plane: AdminPlane) -> dict[str, Any]:
        """What a server that starts there tells the database."""
        journal = UsageJournal(plane.root / "usage")
        writer = UsageWriter(plane.database, plane.root / "usage", journal)
        while writer.write_some():
            pass
        journal.close()
        writer.close()
        found = rows_of(plane.database)
        plane.close()
        return found


def test_an_older_schema_is_copied_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    upgrade(f"sqlite:///{tmp_path}/data/loraplex.db", "0005")
    told = make_backup(Settings(data_dir=tmp_path / "data", model="none"), tmp_path / "backup")
    assert told["database"]["schema"] == "0005"


def test_nothing_is_made_where_nothing_is(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(BackupFailed, match="no data directory"):
        make_backup(Settings(data_dir=missing, model="none"), tmp_path / "backup")
    missing.mkdir()
    with pytest.raises(BackupFailed, match="no database"):
        make_backup(Settings(data_dir=missing, model="none"), tmp_path / "backup")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["missing"]
    assert list(missing.iterdir()) == []


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
class TestOnSqlite:
    """Where it makes no difference which database it is."""

    def test_artifacts_are_links_or_copies(self, used: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
        def tensors(root: Path) -> dict[str, os.stat_result]:
            return {path.parent.name: path.stat() for path in root.rglob(TENSORS_NAME)}

        for path in (used.plane.root / "artifacts").rglob("adapter_*"):
            path.chmod(0o600)  # as uploads over HTTP are
        stored = tensors(used.plane.root / "artifacts")
        assert {d: found.st_ino for d, found in tensors(used.backup()).items()} == {
            d: found.st_ino for d, found in stored.items()
        }

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EXDEV, "another file system")

        monkeypatch.setattr(os, "link", refuse)
        copied = tensors(used.backup("elsewhere"))
        assert copied.keys() == stored.keys()
        assert all(copied[d].st_ino != stored[d].st_ino for d in stored)
        checked(restored(used.plane.root.parent / "elsewhere"))

    def test_a_folder_with_something_in_it_is_refused(self, used: Installation) -> None:
        taken = used.plane.root.parent / "backup"
        taken.mkdir()
        used.backup()
        before = sorted(taken.rglob("*"))
        with pytest.raises(BackupFailed, match="not an empty directory"):
            used.backup()
        with pytest.raises(BackupFailed, match="not an empty directory"):
            make_backup(used.settings, used.plane.root / "key-pepper")
        assert sorted(taken.rglob("*")) == before

    @pytest.mark.parametrize("stage", ["usage journal", "the last artifacts"])
    def test_one_that_is_broken_off_leaves_nothing(self, used: Installation, stage: str) -> None:
        def on_stage(begun: str) -> None:
            if begun == stage:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            used.backup(on_stage=on_stage)
        assert not (used.plane.root.parent / "backup").exists()
        (used.plane.root.parent / "backup").mkdir()
        with pytest.raises(KeyboardInterrupt):
            used.backup(on_stage=on_stage)
        assert list((used.plane.root.parent / "backup").iterdir()) == []

    def test_a_full_disk_is_told_and_left_empty(self, used: Installation, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", 3 << 20) as disk:
            found_no_room = set()
            for left in (8 << 10, 64 << 10):
                disk.leave(left)
                with pytest.raises(BackupFailed, match="cannot be copied") as caught:
                    make_backup(used.settings, disk.root / "backup")
                told = caught.value.message
                assert f"{disk.root}/backup, 0.0 GiB free on tmpfs" in told
                assert told.endswith("make room, or give another directory.")
                found_no_room.add(told.partition(" no room for ")[2].partition(":")[0].rpartition("/")[2])
                assert [path.name for path in disk.root.iterdir()] == ["ballast"]
            assert found_no_room > {"loraplex.db"}, found_no_room

    def test_the_pepper_must_be_that_of_the_keys(self, used: Installation) -> None:
        file = used.plane.root / "key-pepper"
        file.write_text("ab" * 32)
        with pytest.raises(BackupIncomplete) as caught:
            used.backup("other-pepper")
        assert "is not the pepper" in caught.value.details[0]
        file.unlink()
        with pytest.raises(BackupIncomplete) as caught:
            used.backup("no-pepper")
        assert "--key-pepper" in caught.value.details[0]
        settings = used.settings.model_copy(update={"key_pepper": PEPPER.hex()})
        told = make_backup(settings, used.plane.root.parent / "given")
        assert told["secrets"]["key-pepper"] == "--key-pepper"
        assert not (used.plane.root.parent / "given" / "key-pepper").exists()

    def test_the_command(self, used: Installation) -> None:
        def run(*arguments: str) -> Any:
            options = ["--data-dir", str(used.plane.root), "--database-url", used.plane.database.url]
            return CliRunner().invoke(create_cli(), ["backup", *arguments, *options])

        directory = used.plane.root.parent / "backup"
        done = run(str(directory))
        assert done.exit_code == 0, done.output
        assert "artifacts: 2" in done.stdout
        assert f"{directory} is complete. It holds key-pepper and admin-token: keep it secret." in done.stdout
        refused = run(str(directory))
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "not an empty directory" in refused.stderr
        told = run(str(directory) + "-2", "--json")
        assert json.loads(told.stdout) == manifest_of(Path(f"{directory}-2"))
        digest = used.damage()
        lost = run(str(directory) + "-3")
        assert lost.exit_code == 1
        assert digest in lost.stderr
        assert run().exit_code == 2


@pytest.mark.parametrize("backend", ["postgresql"], indirect=True)
class TestOnPostgres:
    def test_rest_is_copied_without_pg_dump(
        self, used: Installation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(BackupIncomplete) as caught:
            used.backup()
        assert "pg_dump" in caught.value.details[0]
        backup = used.plane.root.parent / "backup"
        assert {path.name for path in backup.iterdir()} == {
            "artifacts",
            "key-pepper",
            "admin-token",
            "manifest.json",
        }
        assert manifest_of(backup)["artifacts"]["count"] == 2
        assert manifest_of(backup)["database"]["file"] is None

    def test_a_dump_that_fails_is_told(
        self, used: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = tmp_path / "bin" / "pg_dump"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\necho "server version mismatch" >&2\nexit 1\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        with pytest.raises(BackupFailed, match="server version mismatch"):
            used.backup()
        assert not (used.plane.root.parent / "backup").exists()

    def test_the_password_is_in_no_argument(
        self, used: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other users of the machine see a process's arguments."""
        program = tmp_path / "bin" / "pg_dump"
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "$PGPASSWORD" > {tmp_path}/given\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        plain = make_url(used.plane.database.url)
        for url in (plain.set(password="p%ss wörd"), plain.set(query={"password": "p%ss wörd"})):
            settings = used.settings.model_copy(
                update={"database_url": url.render_as_string(hide_password=False)}
            )
            make_backup(settings, tmp_path / f"backup-{url.password is None}")
            assert (tmp_path / "given").read_text() == "p%ss wörd\n"
            arguments = (tmp_path / "arguments").read_text()
            assert f"--dbname=postgresql://loraplex@127.0.0.1:{url.port}/{url.database}\n" in arguments
