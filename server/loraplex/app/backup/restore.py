"""A new data directory, and a database, from a backup. Nothing is written before the whole backup has been checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import make_url, text
from sqlalchemy.exc import SQLAlchemyError

from loraplex.adapters.store.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    TENSORS_NAME,
    create_file,
    digest_upload,
    write_all,
)
from loraplex.app.backup.databases import PostgresSource, SqliteSource, run_client
from loraplex.app.backup.errors import BackupRefused, RestoreFailed, refuse_bucket
from loraplex.app.backup.manifest import (
    PEPPER,
    POSTGRES_FILE,
    SQLITE_FILE,
    Manifest,
    describe_file,
    open_within,
    read_manifest,
)
from loraplex.app.settings import Settings
from loraplex.app.storage.artifacts import artifact_dir
from loraplex.app.storage.data_dir_lock import lock_data_dir
from loraplex.app.storage.database import existing_database, shown_database
from loraplex.app.storage.restore_mark import (
    remove_restore_mark,
    restore_mark,
    set_restore_mark,
)
from loraplex.control.tenancy.pepper import pepper_mark
from loraplex.migrations.run import require_known_schema

_HARMLESS = frozenset({"lock", "lost+found"})
"""Files that an empty data directory may hold: a new volume has the second."""
_TABLES = (
    "SELECT count(*) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace "
    "WHERE nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'"
)
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Restored:
    """The result: the backup's manifest, where the database is (without password), and what the operator must know."""

    manifest: Manifest
    database: str
    notes: tuple[str, ...]


def restore_backup(
    settings: Settings, directory: Path, *, on_stage: Callable[[str], None] = lambda stage: None
) -> Restored:
    """Make the empty data directory, artifact store and database of `settings` from the backup in `directory`.

    `on_stage` is told what begins. Raises BackupRefused, DatabaseTooNew, SettingsInvalid and nothing was written;
    RestoreFailed, which says whether the same command must be run again: until then no server starts there."""
    refuse_bucket(settings)
    manifest = read_manifest(directory)
    target = _Target(settings, manifest)
    _require_fit(settings, directory, manifest)
    target.require_empty()
    on_stage("check")
    _require_whole(directory, manifest)
    target.require_room()
    with lock_data_dir(settings.data_dir) as lock, _failures_named():
        target.require_empty()
        if restore_mark(settings.data_dir) is None:
            set_restore_mark(settings.data_dir, manifest.sha256)
        on_stage("artifacts")
        target.write_artifacts(directory)
        on_stage("files")
        target.write_files(directory)
        on_stage("database")
        target.write_database(directory, lock.fileno())
        on_stage("end")
        os.sync()
        remove_restore_mark(settings.data_dir)
    return Restored(manifest, shown_database(target.url), tuple(_notes(settings, manifest)))


class _Target:
    """Where a backup goes: the settings' data directory, artifact store and database."""

    def __init__(self, settings: Settings, manifest: Manifest) -> None:
        self._data_dir = settings.data_dir
        self._manifest = manifest
        self._store = artifact_dir(settings) / "sha256"
        self.url, _ = existing_database(settings)
        parsed = make_url(self.url)
        self._sqlite = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None
        self._pg_restore = ""
        kind = POSTGRES_FILE if self._sqlite is None else SQLITE_FILE
        if manifest.database.file is None:
            raise BackupRefused("the backup has no database: pg_dump was missing when it was made.")
        if manifest.database.file != kind:
            given = "--database-url names PostgreSQL" if self._sqlite is None else "the target is SQLite"
            remedy = (
                "leave it out" if self._sqlite is None else "give the --database-url of a new, empty database"
            )
            raise BackupRefused(f"the backup is of {manifest.database.server}, and {given}: {remedy}.")
        if self._sqlite is None:
            self._pg_restore = shutil.which("pg_restore") or ""
            if not self._pg_restore:
                raise RestoreFailed(
                    "pg_restore is not installed: install PostgreSQL's client programs. Nothing was written."
                )

    @property
    def _is_repeated(self) -> bool:
        """An earlier restore of the same backup did not end here. A mark that was cut is the first thing that one
        wrote, and the last."""
        return restore_mark(self._data_dir) in ("", self._manifest.sha256)

    def require_empty(self) -> None:
        """Raises RestoreFailed."""
        mark = restore_mark(self._data_dir)
        if mark is not None and not self._is_repeated:
            raise RestoreFailed(
                f"{self._data_dir} holds the unfinished restore of another backup: repeat that one, or remove what is "
                "in the directory. Nothing was written."
            )
        places = [] if self._is_repeated else [self._data_dir, self._store]
        if self._sqlite is not None and not self._is_repeated:
            places += [Path(f"{self._sqlite}{suffix}") for suffix in ("", "-wal", "-shm", "-journal")]
        for place in places:
            if not _is_empty(place):
                raise RestoreFailed(
                    f"{place} is not empty: a restore goes into a new or empty place. Nothing was written."
                )
        if self._sqlite is None and not self._is_repeated and self._postgres_tables():
            raise RestoreFailed(
                f"the database {shown_database(self.url)} is not empty: create a new one. Nothing was written."
            )

    def require_room(self) -> None:
        """Raises RestoreFailed."""
        needed: dict[Path, int] = {}
        for place, num_bytes in (
            (self._store, self._manifest.artifacts.bytes),
            (self._data_dir, sum(part.bytes for part in self._manifest.files.values())),
        ):
            there = next(path for path in (place, *place.absolute().parents) if path.exists())
            needed[there] = needed.get(there, 0) + num_bytes
        for there, num_bytes in needed.items():
            free = shutil.disk_usage(there).free
            if not self._is_repeated and free < num_bytes + _SPARE_BYTES:
                raise RestoreFailed(
                    f"{there} has {free >> 20} MiB free, and the backup needs {(num_bytes + _SPARE_BYTES) >> 20}. "
                    "Nothing was written."
                )

    def write_artifacts(self, directory: Path) -> None:
        """Raises RestoreFailed, OSError."""
        self._store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for digest in self._manifest.artifacts.digests:
            target = self._store / digest[:2] / digest
            if target.exists():
                shutil.rmtree(target)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            target.mkdir(mode=0o700)
            for name in (CONFIG_NAME, TENSORS_NAME):
                _copy(directory, _artifact_file(digest, name), target / name)
            if digest_upload(target / CONFIG_NAME, target / TENSORS_NAME) != digest:
                raise RestoreFailed(f"artifact {digest} changed while it was copied")

    def write_files(self, directory: Path) -> None:
        """The secrets and the usage. Raises RestoreFailed, OSError."""
        for name, part in self._manifest.files.items():
            if name not in (SQLITE_FILE, POSTGRES_FILE):
                self._replace(directory, name, self._data_dir / name, part.sha256)

    def write_database(self, directory: Path, lock: int) -> None:
        """`lock` stays with the program that fills PostgreSQL: where this process is killed, the next try waits for
        that one's end. Raises RestoreFailed, OSError, SQLAlchemyError."""
        name = self._manifest.database.file
        assert name is not None
        if self._sqlite is not None:
            self._sqlite.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(directory, name, self._sqlite, self._manifest.files[name].sha256)
            return
        if self._postgres_tables():
            # One transaction fills it: it is empty, or holds everything.
            if not self._holds_backup():
                raise RestoreFailed(
                    f"{shown_database(self.url)} holds something else by now; give an empty one"
                )
            return
        options = ["--single-transaction", "--exit-on-error", "--no-owner", "--no-privileges"]
        failure = run_client(self._pg_restore, [*options, str(directory / name)], make_url(self.url), (lock,))
        if failure:
            raise RestoreFailed(f"pg_restore failed: {failure}")

    def _replace(self, directory: Path, name: str, target: Path, sha256: str) -> None:
        target.unlink(missing_ok=True)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _copy(directory, name, target) != sha256:
            raise RestoreFailed(f"{name} changed while it was copied")

    def _postgres_tables(self) -> int:
        """Raises RestoreFailed."""
        try:
            with PostgresSource(self.url).transaction() as connection:
                return int(connection.scalar(text(_TABLES)) or 0)
        except SQLAlchemyError as error:
            raise RestoreFailed(
                f"the database {shown_database(self.url)} cannot be used: {_reason(error)}. Nothing was written."
            ) from error

    def _holds_backup(self) -> bool:
        """Whether a restore that was killed at its end left this: its audit log says so."""
        expected = self._manifest.database
        try:
            found = PostgresSource(self.url).read()
        except SQLAlchemyError:
            return False
        head = None if expected.audit is None else (expected.audit.seq, expected.audit.hash)
        return (found.audit, found.pepper_mark) == (head, expected.pepper_mark)


def _require_fit(settings: Settings, directory: Path, manifest: Manifest) -> None:
    """Raises BackupRefused, DatabaseTooNew."""
    require_known_schema(manifest.database.schema_)
    mark, pepper = manifest.database.pepper_mark, settings.key_pepper
    origin = "--key-pepper"
    if not pepper and PEPPER in manifest.files:
        origin = f"{PEPPER} of the backup"
        try:
            with open_within(directory, PEPPER) as file:
                pepper = file.read(1 << 10).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BackupRefused(f"{directory / PEPPER} cannot be read: {error}.") from error
    if mark is None or not pepper:
        return
    try:
        fits = pepper_mark(bytes.fromhex(pepper)) == mark
    except ValueError:
        fits = False
    if not fits:
        raise BackupRefused(
            f"{origin} is not the pepper of the keys in this backup: none of them would work."
        )


def _require_whole(directory: Path, manifest: Manifest) -> None:
    """Every byte, and for SQLite that every version has its bytes. Raises BackupRefused."""
    for name, part in manifest.files.items():
        try:
            with open_within(directory, name) as file:
                found = describe_file(file)
        except OSError as error:
            raise BackupRefused(f"{directory / name} cannot be read: {error.strerror}.") from error
        if found != part.model_dump():
            raise BackupRefused(
                f"{directory / name} was altered or cut: its digest is not that of the manifest."
            )
    for digest in manifest.artifacts.digests:
        names = [_artifact_file(digest, name) for name in (CONFIG_NAME, TENSORS_NAME)]
        try:
            for name in names:
                open_within(directory, name).close()
            found_digest = digest_upload(*(directory / name for name in names))
        except OSError as error:
            raise BackupRefused(
                f"artifact {digest} cannot be read: {error.filename}: {error.strerror}."
            ) from error
        if found_digest != digest:
            raise BackupRefused(f"artifact {digest} in {directory} was altered.")
    if manifest.database.file == SQLITE_FILE:
        _require_whole_sqlite(directory / SQLITE_FILE, manifest)


def _require_whole_sqlite(path: Path, manifest: Manifest) -> None:
    try:
        # Immutable: SQLite makes no file beside the one that it reads.
        uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            found = connection.execute("SELECT version_num FROM alembic_version").fetchall()
            snapshot = SqliteSource.snapshot(connection, SQLITE_FILE)
    except sqlite3.Error as error:
        raise BackupRefused(f"{path} is no database of Loraplex: {error}.") from error
    parts = manifest.artifacts
    absent = snapshot.living - {*parts.digests, *parts.corrupt, *parts.damaged}
    if verdict != "ok" or found != [(manifest.database.schema_,)]:
        raise BackupRefused(f"{path} is damaged, or not the database that the manifest describes.")
    if absent:
        raise BackupRefused(f"{path} names artifact {min(absent)}, and the backup does not have it.")


def _notes(settings: Settings, manifest: Manifest) -> Iterator[str]:
    if manifest.database.pepper_mark is not None and PEPPER not in manifest.files and not settings.key_pepper:
        yield "the key pepper is not in the backup: start the servers with the --key-pepper that they had."
    for word, digests in (("corrupt", manifest.artifacts.corrupt), ("damaged", manifest.artifacts.damaged)):
        if digests:
            yield f"artifacts that the backup lacks, because they were {word}: {', '.join(digests)}."


@contextlib.contextmanager
def _failures_named() -> Iterator[None]:
    """From here on a part may have been written."""
    again = "The restore has not ended, and no server starts there: run the same command again."
    try:
        yield
    except RestoreFailed as error:
        raise RestoreFailed(
            f"{error.message.removesuffix(' Nothing was written.').rstrip('.')}. {again}"
        ) from error
    except SQLAlchemyError as error:
        raise RestoreFailed(f"the database failed: {_reason(error)}. {again}") from error
    except OSError as error:
        raise RestoreFailed(f"{error.filename or 'a file'}: {error.strerror}. {again}") from error


def _copy(directory: Path, name: str, target: Path) -> str:
    """The SHA-256 of what was written; a hole stays one, as journals have them. Raises OSError."""
    sha = hashlib.sha256()
    with open_within(directory, name) as original, create_file(target) as copy:
        size = 0
        while data := original.read(CHUNK_BYTES):
            sha.update(data)
            if data.count(0) == len(data):
                copy.seek(len(data), os.SEEK_CUR)
            else:
                write_all(copy, data)
            size += len(data)
        copy.truncate(size)
    return sha.hexdigest()


def _artifact_file(digest: str, name: str) -> str:
    return f"artifacts/sha256/{digest[:2]}/{digest}/{name}"


def _is_empty(place: Path) -> bool:
    if not place.is_dir():
        return not place.exists() and not place.is_symlink()
    return all(entry.name in _HARMLESS for entry in place.iterdir())


def _reason(error: SQLAlchemyError) -> str:
    return (str(getattr(error, "orig", None) or error).splitlines() or ["no reason given"])[0][:300].rstrip(
        "."
    )
