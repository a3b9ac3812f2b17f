"""The process that holds Ray's driver: `python -m loraplex.app.cluster.manager`, a ClusterSpec as a line of JSON on
stdin.

It joins a Ray that runs: a cluster's, or that of `head`. It writes `Event` lines on stdout. It ends when stdin does, on
SIGTERM, or with a reason in a last `failed` event; engines serve on without it, and the next manager finds them. SIGHUP
replaces all engines, new ones before old ones. A head that is lost is told and left alone: its engines serve on.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from loraplex.app.cluster.app import build
from loraplex.app.cluster.events import one_line, open_events
from loraplex.app.cluster.spec import ClusterSpec, Event, application_name, application_prefix
from loraplex.app.settings import load_settings

LOOK_S = 1.0
HEAD_TRIES = 3
"""Looks in a row at which the head does not answer, before it is taken for lost."""
STOP_S = 8.0
"""Time for an orderly end; then the engines of a running cluster are left to the next manager."""


class Manager:
    """Ray, with our application on it, for one spec."""

    def __init__(self, spec: ClusterSpec, tell: Callable[[Event], None]) -> None:
        self._spec = spec
        self._name = application_name(spec)
        self._tell = tell
        self._ending = threading.Event()
        self._replacing = threading.Event()
        self._woken = threading.Event()
        self._is_connected = self._has_head = False
        self._head: tuple[str, int] | None = None

    def end(self) -> None:
        """Have `run` return. Safe from signals and other threads."""
        self._ending.set()
        self._woken.set()

    def replace(self) -> None:
        self._replacing.set()
        self._woken.set()

    def run(self) -> None:
        """Return when it is to end."""
        started = time.monotonic()
        load_settings(self._spec.settings)  # before Ray takes its time
        self._connect()
        if not self._is_there():
            self._deploy()
        if self._spec.address:
            self._remove_others()
        self._tell(Event("ready", seconds=round(time.monotonic() - started, 1)))
        missed = 0
        while not self._ending.is_set():
            self._woken.wait(LOOK_S)
            self._woken.clear()
            missed = 0 if self._answers() else missed + 1
            if missed == HEAD_TRIES:
                self._has_head = False
                self._tell(Event("head_lost"))
            if self._replacing.is_set() and not missed:
                self._replacing.clear()
                self._deploy()

    def close(self) -> None:
        """Take the engines of a running cluster away. Those of a Ray of our own end with it."""
        if not self._is_connected or not self._spec.address:
            return
        if self._has_head:  # else the next manager's engines may have the name by now
            serve.delete(self._name)
        ray.shutdown()

    def _connect(self) -> None:
        ray.init(address=self._spec.address or self._spec.head, log_to_driver=True, logging_level="error")
        self._is_connected = self._has_head = True
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        self._head = host.strip("[]"), int(port)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})

    def _deploy(self) -> None:
        """Run the application. Where it runs already, its replicas are replaced: never call it for another number of
        them. Raises RuntimeError where the engines do not start."""
        application = build(self._application())
        serve.run(application, name=self._name, route_prefix=None)

    def _application(self) -> dict[str, Any]:
        spec = self._spec
        if spec.gpus is None and spec.settings.get("device", "auto") == "auto":
            spec = msgspec.structs.replace(spec, gpus=1.0 if ray.cluster_resources().get("GPU") else 0.0)
        return dict(msgspec.to_builtins(spec))

    def _is_there(self) -> bool:
        """Whether an earlier manager of this server has left the application, which Serve's controller keeps."""
        while not self._ending.is_set():
            found = serve.status().applications.get(self._name)
            if found is None or found.status != ApplicationStatus.DEPLOYING:
                return found is not None and found.status in (
                    ApplicationStatus.RUNNING,
                    ApplicationStatus.UNHEALTHY,
                )
            self._ending.wait(LOOK_S)
        return True

    def _remove_others(self) -> None:
        """End what earlier servers on this address have left with other settings."""
        for name in serve.status().applications:
            if name.startswith(application_prefix(self._spec)) and name != self._name:
                serve.delete(name)

    def _answers(self) -> bool:
        """Whether the head takes connections."""
        assert self._head is not None
        try:
            with socket.create_connection(self._head, timeout=LOOK_S):
                return True
        except OSError:
            return False


def main() -> int:
    tell = open_events()
    line = sys.stdin.buffer.readline()
    if not line:  # the server or its Ray has ended before it had an address
        return 0
    spec = msgspec.json.decode(line, type=ClusterSpec)
    manager = Manager(spec, tell)
    signal.signal(signal.SIGTERM, lambda number, frame: manager.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda number, frame: manager.replace())
    threading.Thread(target=_end_with_stdin, args=(manager, spec), daemon=True).start()
    code = 0
    try:
        manager.run()
    except Exception as error:
        tell(Event("failed", reason=one_line(error)))
        code = 1
    _end_within(STOP_S, code)
    try:
        manager.close()
    finally:
        if spec.address:  # the server removes the folder too, unless it was killed
            shutil.rmtree(spec.folder, ignore_errors=True)
        os._exit(code)  # Ray's threads may wait for a head that is gone


def _end_with_stdin(manager: Manager, spec: ClusterSpec) -> None:
    sys.stdin.buffer.read()
    if not spec.address:
        os._exit(0)  # nothing is to be taken away, and it may be waiting for Ray
    manager.end()
    _end_within(STOP_S, 0)


def _end_within(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
