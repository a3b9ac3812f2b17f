"""A real PostgreSQL server for tests: a throwaway cluster of the installed programs, one to a test process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import getpass
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from loraplex.control.audit.recorder import GENESIS
from loraplex.migrations.run import upgrade

INSTALL = "apt-get install postgresql"
USER = "loraplex"
TABLES = (
    *("tenants", "installation", "deleted_tenants", "usage", "usage_days", "usage_sources", "budgets"),
    *("release_outcomes", "running_arms", "leases", "webhook_deliveries"),
)
AUDIT_TABLES = ("audit_log", "audit_texts")
_numbers = itertools.count()


def find_programs() -> Path | None:
    """The folder of PostgreSQL's server programs; Debian keeps them off the PATH."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    return versions[-1].parent if versions else None


def need_programs() -> Path:
    """Skips the test where they are missing; fails it in CI, where they must not be."""
    programs = find_programs()
    if programs is None:
        message = f"PostgreSQL is not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return programs


class PostgresServer:
    """A cluster in a folder of its own, on a free port of the loopback address. `kill` and `start` as often as a test
    likes; what was committed is there again."""

    def __init__(self, *, forgetful: bool = False) -> None:
        """A `forgetful` one is quicker, and may lose its last commits when it is killed."""
        self._forgetful = forgetful
        self._programs = need_programs()
        self.directory = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._cleaner: psycopg.Connection[Any] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        # The server refuses to run as root.
        self._user = "postgres" if os.getuid() == 0 else getpass.getuser()
        if os.getuid() == 0:
            shutil.chown(self.directory, self._user)
        data = str(self.directory / "data")
        # A locale that sorts as people do, not by code points: the order of bytes must not be relied upon.
        locale = ("--locale=C", "--locale-provider=icu", "--icu-locale=en")
        self._run("initdb", "-D", data, "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync", *locale)
        self.start()

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [str(self._programs / program), *arguments]
        if os.getuid() == 0:
            command = ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--init-groups", *command]
        return command

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            self._command(program, *arguments), check=True, capture_output=True, cwd=self.directory
        )

    def start(self) -> None:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self.directory,
            "fsync": "off",
            "full_page_writes": "off",
            "synchronous_commit": "off" if self._forgetful else "on",
            "jit": "off",
            "max_connections": 200,
            "shared_buffers": "32MB",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(self.directory / "data"), *arguments),
                stdout=log,
                stderr=log,
                cwd=self.directory,
            )
        end = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self._conninfo("postgres"), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.directory / "log").read_text()) from None
                time.sleep(0.02)

    def kill(self) -> None:
        """At once, without a checkpoint and without a word to its clients."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)

    def hang(self) -> None:
        """All of its processes: it takes connections and bytes, and does nothing, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """To the postmaster first, so that it starts no more."""
        assert self._process is not None
        self._process.send_signal(number)
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int(status.read_text().rpartition(")")[2].split()[1])
                if parent == self._process.pid:
                    os.kill(int(status.parent.name), number)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        if self.running:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _conninfo(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user={USER} dbname={database}"

    def url(self, database: str, *, port: int | None = None) -> str:
        return f"postgresql+psycopg://{USER}@127.0.0.1:{port or self.port}/{database}"

    def create_database(self, template: str = "template0") -> str:
        """The URL of a new, empty one."""
        name = f"test_{next(_numbers)}"
        with contextlib.closing(psycopg.connect(self._conninfo("postgres"), autocommit=True)) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    @functools.cached_property
    def shared_url(self) -> str:
        """A migrated database that tests use one after the other, each after `clear`."""
        url = self.create_database()
        upgrade(url)
        return url

    def clear(self) -> str:
        """The URL of the shared database, emptied."""
        url = self.shared_url
        if self._cleaner is None or self._cleaner.closed:
            database = url.rpartition("/")[2]
            self._cleaner = psycopg.connect(self._conninfo(database), autocommit=True)
        for table in TABLES:  # the other tables' rows go with a tenant's
            self._cleaner.execute(f"DELETE FROM {table}")
        with self._cleaner.transaction():
            # As no client may: the audit log's triggers let nobody delete from it.
            self._cleaner.execute("SET LOCAL session_replication_role = replica")
            for table in AUDIT_TABLES:
                self._cleaner.execute(f"DELETE FROM {table}")
            self._cleaner.execute("UPDATE audit_head SET seq = 0, hash = %s", [GENESIS])
        return url


@functools.cache
def postgres_server() -> PostgresServer:
    """The one server of this test process, started when first asked for; gone with the interpreter."""
    server = PostgresServer(forgetful=True)
    atexit.register(server.close)
    return server
