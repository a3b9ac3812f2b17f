"""A backup: a folder that a new data directory can be made of.

loraplex.db | loraplex.dump   the database at one moment: SQLite's file, or PostgreSQL's dump
artifacts/sha256/             every artifact that this database names
usage/                        what had ended by then and was not in the database yet
key-pepper, admin-token       where the data directory has them
manifest.json                 what is in it; written last, so that a folder without it is no backup
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from loraplex.adapters.store.files import create_file, open_regular, write_all
from loraplex.app.backup.artifacts import ArtifactCopies
from loraplex.app.backup.databases import PostgresSource, Snapshot, Source, SqliteSource
from loraplex.app.backup.errors import BackupFailed, BackupIncomplete, refuse_bucket
from loraplex.app.backup.journal import copy_journals
from loraplex.app.backup.manifest import FORMAT, PEPPER, TOKEN, describe_file, write_manifest
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.app.storage.database import database_url, shown_database
from loraplex.app.storage.disk import full_disk
from loraplex.control.tenancy.pepper import pepper_mark
from loraplex.migrations.run import SchemaState, examine_schema

MAX_ROUNDS = 20


def make_backup(
    settings: Settings, directory: Path, *, on_stage: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Copy the installation of `settings` into `directory`, which is new or empty; what the manifest says. `on_stage`
    is told what begins. Raises BackupIncomplete, where what there was is kept; else BackupFailed, SettingsInvalid,
    DatabaseTooNew, and nothing is kept."""
    refuse_bucket(settings)
    url, schema = _existing_database(settings)
    with _new_folder(directory), _failures_named(url, directory):
        parsed = make_url(url)
        on_sqlite = parsed.get_backend_name() == "sqlite"
        source: Source = SqliteSource(Path(parsed.database or "")) if on_sqlite else PostgresSource(url)
        copies = ArtifactCopies(artifact_dir(settings) / "sha256", directory / "artifacts" / "sha256")
        snapshot, lost = _copy_together(settings, source, copies, directory, on_stage)
        secrets, missing = _copy_secrets(settings, snapshot, directory)
        content = {
            "format": FORMAT,
            "loraplex": version("loraplex"),
            "made_at": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "database": {
                "server": schema.server,
                "schema": schema.found,
                "file": snapshot.file,
                "audit": snapshot.audit and {"seq": snapshot.audit[0], "hash": snapshot.audit[1]},
                "pepper_mark": snapshot.pepper_mark,
            },
            "artifacts": {
                "count": len(copies.num_bytes),
                "bytes": sum(copies.num_bytes.values()),
                "digests": sorted(copies.num_bytes),
                "corrupt": sorted(lost & snapshot.corrupt),
                "damaged": sorted(lost - snapshot.corrupt),
            },
            "secrets": secrets,
            "files": {str(path.relative_to(directory)): _described(path) for path in _own_files(directory)},
        }
        os.sync()
        manifest = write_manifest(directory, content)
    missing += _missing(snapshot, lost)
    if missing:
        raise BackupIncomplete(f"the backup in {directory} is not complete:", tuple(missing))
    return manifest


def _copy_together(
    settings: Settings,
    source: Source,
    copies: ArtifactCopies,
    directory: Path,
    on_stage: Callable[[str], None],
) -> tuple[Snapshot, set[str]]:
    """Until every artifact is there that the copied database names; those that the store itself lacks.

    Most artifacts come before the database, so that few can be deleted after it was copied. Where one was, the database
    is copied again: the new copy does not name it.
    """
    on_stage("artifacts")
    copies.copy_artifacts(source.read().living)
    for _ in range(MAX_ROUNDS):
        on_stage("usage journal")
        copy_journals(settings.data_dir / "usage", directory / "usage")
        on_stage("database")
        snapshot = source.copy(directory)
        on_stage("the last artifacts")
        absent = copies.copy_artifacts(snapshot.living)
        if absent <= source.read().living:  # they were not deleted: they are lost
            copies.keep_only(set(snapshot.living))
            return snapshot, absent
    raise BackupFailed(
        "adapters are deleted all the time while they are copied; try again when it is calmer."
    )


def _copy_secrets(
    settings: Settings, snapshot: Snapshot, directory: Path
) -> tuple[dict[str, str | None], list[str]]:
    """Where the secrets of this installation are, for the manifest; and what is missing, in sentences."""
    places: dict[str, str | None] = {PEPPER: None, TOKEN: None}
    for name in places:
        with contextlib.suppress(FileNotFoundError):
            _copy(settings.data_dir / name, directory / name)
            places[name] = name
    pepper = settings.key_pepper
    if pepper:
        places[PEPPER] = "--key-pepper"
    elif places[PEPPER]:
        pepper = (directory / PEPPER).read_text().strip()
    missing = []
    if snapshot.pepper_mark is not None and not _fits(pepper, snapshot.pepper_mark):
        found = f"{places[PEPPER]} is not the pepper" if pepper else "there is no key-pepper"
        missing.append(
            f"{found} of the keys in the database: without it none of them works. Give the --key-pepper that the "
            "servers have."
        )
    return places, missing


def _fits(pepper: str, mark: str) -> bool:
    try:
        return pepper_mark(bytes.fromhex(pepper)) == mark
    except ValueError:
        return False


def _missing(snapshot: Snapshot, lost: set[str]) -> list[str]:
    lines = [
        f"artifact {digest} is damaged or lost in the store: upload the same files again, or restore it."
        for digest in sorted(lost - snapshot.corrupt)
    ]
    if snapshot.file is None:
        lines.append(
            "the database is not in it, since pg_dump is not installed: install PostgreSQL's client programs and make "
            "another backup, or dump the database with pg_dump now."
        )
    return lines


def _existing_database(settings: Settings) -> tuple[str, SchemaState]:
    """Its URL, and its schema, whichever that is: a backup is also made before an update."""
    if not settings.database_url and not settings.data_dir.is_dir():
        raise BackupFailed(f"there is no data directory {settings.data_dir}; give the server's --data-dir.")
    url = database_url(settings)
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file():
        raise BackupFailed(
            f"there is no database at {parsed.database}; give the server's --data-dir or --database-url."
        )
    with _failures_named(url):
        state = examine_schema(url)
    if state.found is None:
        raise BackupFailed(f"{shown_database(url)} is empty: no server has used it yet.")
    return url, state


@contextlib.contextmanager
def _new_folder(directory: Path) -> Iterator[None]:
    """Mode 0700, as everything in it is its owner's alone; on an error it is as it was before."""
    is_new = not directory.exists()
    try:
        if not is_new and (not directory.is_dir() or any(directory.iterdir())):
            raise BackupFailed(f"{directory} is not an empty directory; give a new one.")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    except OSError as error:
        raise BackupFailed(f"{directory} cannot be used: {error.strerror}.") from error
    try:
        yield
    except BaseException:
        for entry in directory.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        if is_new:
            directory.rmdir()
        raise


@contextlib.contextmanager
def _failures_named(url: str, directory: Path | None = None) -> Iterator[None]:
    """Give failures the path and a sentence. `directory`: where the backup is written."""
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        remedy = "make room, or give another directory"
        if directory is not None and (full := full_disk(error, directory, remedy)):
            raise BackupFailed(f"the installation cannot be copied: {full}") from error
        if isinstance(error, OSError):
            raise BackupFailed(f"{error.filename or 'a file'} cannot be copied: {error.strerror}.") from error
        reason = (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0]
        raise BackupFailed(f"the database {shown_database(url)} cannot be copied: {reason[:300]}.") from error


def _copy(source: Path, target: Path) -> None:
    with open_regular(source) as original, create_file(target) as copy:
        write_all(copy, original.read())


def _described(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return describe_file(file)


def _own_files(directory: Path) -> Iterator[Path]:
    """All files of a backup except the artifacts, which their names describe, and the manifest."""
    yield from sorted(path for path in directory.iterdir() if path.is_file())
    yield from sorted((directory / "usage").glob("*/*"))
