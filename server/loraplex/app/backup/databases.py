"""A copy of the database as it was at one moment, while servers use it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from sqlalchemy import URL, Connection, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from loraplex.adapters.store.files import create_file
from loraplex.app.backup.errors import BackupFailed
from loraplex.app.backup.manifest import POSTGRES_FILE, SQLITE_FILE
from loraplex.control.tenancy.pepper import PEPPER_NAME

_CONNECT_TIMEOUT_S = 10
_LIVING = (
    "SELECT digest, max(state) FROM adapter_versions "
    "WHERE state NOT IN ('deleted', 'rejected', 'retired', 'lost') GROUP BY digest"
)
_MARK = "SELECT value FROM installation WHERE name = :name"
_HEAD = "SELECT seq, hash FROM audit_head"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A consistent read of a database. `living` are the digests of versions whose bytes are kept; `corrupt` those of
    them whose bytes are known to be damaged. `pepper_mark` None: there were never keys. `file` None: it could not be
    copied. `audit`: the length of the audit log and the hash of its last row; None in a schema without one."""

    living: frozenset[str]
    corrupt: frozenset[str]
    pepper_mark: str | None
    audit: tuple[int, str] | None
    file: str | None


class Source(Protocol):
    """The database of an installation. Raises BackupFailed, SQLAlchemyError, sqlite3.Error, OSError."""

    def read(self) -> Snapshot:
        """Without a copy."""

    def copy(self, folder: Path) -> Snapshot:
        """The copy is a file in `folder`, and takes the place of one that is there."""


class SqliteSource:
    """A copy by SQLite's own backup, which takes one state of the file and keeps no writer waiting."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Snapshot:
        with closing(self._open()) as connection:
            return self.snapshot(connection, None)

    def copy(self, folder: Path) -> Snapshot:
        target = folder / SQLITE_FILE
        target.unlink(missing_ok=True)
        create_file(target).close()
        with closing(sqlite3.connect(target)) as copy:
            with closing(self._open()) as original:
                original.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")  # so that the copy is one file
            (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise BackupFailed(
                    f"the database {self._path} is damaged ({verdict}); restore an older backup."
                )
            return self.snapshot(copy, SQLITE_FILE)

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True, timeout=30)

    @staticmethod
    def snapshot(connection: sqlite3.Connection, file: str | None) -> Snapshot:
        rows = connection.execute(_LIVING).fetchall()
        has_log = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'audit_head'").fetchone()
        head = connection.execute(_HEAD).fetchone() if has_log else None
        return _snapshot(rows, connection.execute(_MARK, {"name": PEPPER_NAME}).fetchone(), head, file)


class PostgresSource:
    """A copy by pg_dump, at a snapshot that this process has read too. Without the program nothing is copied."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)

    def read(self) -> Snapshot:
        with self.transaction() as connection:
            return self.snapshot(connection, None)

    def copy(self, folder: Path) -> Snapshot:
        program = shutil.which("pg_dump")
        if program is None:
            return self.read()
        target = folder / POSTGRES_FILE
        target.unlink(missing_ok=True)
        create_file(target).close()
        with self.transaction() as connection:
            snapshot = connection.scalar(text("SELECT pg_export_snapshot()"))
            self._dump(program, str(snapshot), target)
            return self.snapshot(connection, POSTGRES_FILE)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        engine = create_engine(
            self._url,
            poolclass=NullPool,
            isolation_level="REPEATABLE READ",
            connect_args={"connect_timeout": _CONNECT_TIMEOUT_S},
        )
        try:
            with engine.begin() as connection:
                yield connection
        finally:
            engine.dispose()

    def _dump(self, program: str, snapshot: str, target: Path) -> None:
        options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
        failure = run_client(program, [*options, f"--file={target}"], self._url)
        if failure:
            raise BackupFailed(f"pg_dump failed: {failure}")

    @staticmethod
    def snapshot(connection: Connection, file: str | None) -> Snapshot:
        rows = [tuple(row) for row in connection.execute(text(_LIVING))]
        has_log = connection.scalar(text("SELECT to_regclass('audit_head')"))
        head = connection.execute(text(_HEAD)).first() if has_log else None
        return _snapshot(rows, connection.execute(text(_MARK), {"name": PEPPER_NAME}).first(), head, file)


def run_client(program: str, options: list[str], url: URL, held: tuple[int, ...] = ()) -> str:
    """Run a client program of PostgreSQL on this database; why it failed, "" where it did not. The password goes by
    the environment, which other users do not see. The process keeps the file descriptors `held`."""
    given = url.password or url.query.get("password")
    password = {} if given is None else {"PGPASSWORD": str(given)}
    # Not `URL.set`, which takes None for "as it is".
    without = url._replace(drivername="postgresql", password=None)
    shown = without.difference_update_query(["password"]).render_as_string(hide_password=False)
    done = subprocess.run(  # noqa: S603 - the program that PATH names, and arguments of ours
        [program, *options, f"--dbname={shown}"],
        env=os.environ | password,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        pass_fds=held,
    )
    if not done.returncode:
        return ""
    said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
    return said[-1][:300]


def _snapshot(
    living: list[tuple[str, str]], mark: Any | None, head: Any | None, file: str | None
) -> Snapshot:
    corrupt = frozenset(digest for digest, state in living if state == "corrupt")
    audit = None if head is None else (int(head[0]), str(head[1]))
    return Snapshot(frozenset(digest for digest, _ in living), corrupt, mark and mark[0], audit, file)
