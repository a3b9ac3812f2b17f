"""A real Redis server for tests: a throwaway one of the installed program, in a folder of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis

INSTALL = "apt-get install redis-server"


def need_program() -> str:
    """Skips the test where it is missing; fails it in CI, where it must not be."""
    program = shutil.which("redis-server")
    if program is None:
        message = f"Redis is not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return program


class RedisServer:
    """On free ports of the loopback address. Without `keeps_data` it is empty after each start, as a Redis that lost
    its data. A node of a `cluster` begins alone and without slots. `options` are redis-server's own."""

    def __init__(self, *, keeps_data: bool = False, cluster: bool = False, **options: str) -> None:
        self._program = need_program()
        self.directory = Path(tempfile.mkdtemp(prefix="loraplex-redis-"))
        with socket.socket() as probe, socket.socket() as bus:
            for one in (probe, bus):
                one.bind(("127.0.0.1", 0))
            self.port, self._bus = (int(one.getsockname()[1]) for one in (probe, bus))
        if cluster:
            options |= {
                "cluster-enabled": "yes",
                "cluster-port": str(self._bus),
                "cluster-node-timeout": "15000",  # a node that a busy machine holds up has not failed
            }
        kept = {"appendonly": "yes", "appendfsync": "always"} if keeps_data else {"appendonly": "no"}
        self._options = {"save": "", **kept, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it answers."""
        arguments = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        where = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen([self._program, *where, *arguments], stdout=log, stderr=log)
        end = time.monotonic() + 30
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise AssertionError((self.directory / "log").read_text()) from None
                time.sleep(0.01)

    @functools.cached_property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=60)

    def meet(self, other: RedisServer) -> None:
        """Another node joins this one's cluster."""
        self.client.execute_command("CLUSTER", "MEET", "127.0.0.1", str(other.port), str(other._bus))

    def hang(self) -> None:
        """It takes connections and bytes, and does nothing, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(30)

    def revive(self) -> None:
        """As a test finds it: it runs, answers, and has memory."""
        self.go_on()
        if self._process is None or self._process.poll() is not None:
            self.start()
        self.free_memory()

    def fill_memory(self) -> None:
        """From now on it has no memory left, until `free_memory`."""
        self.client.config_set("maxmemory", "1")

    def free_memory(self) -> None:
        self.client.config_set("maxmemory", "0")

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
        self.client.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


@functools.cache
def redis_server() -> RedisServer:
    """The one server of this test process, started when first asked for; gone with the interpreter. A test that needs
    it empty flushes it."""
    server = RedisServer()
    atexit.register(server.close)
    return server
