"""The CPU time of a live server's processes, by what they are."""

from __future__ import annotations

import contextlib

import psutil

from support.servers.live_server import LiveServer


class CpuTimes:
    """CPU seconds of the server's process, of its engine's, of those that build grammars with their forks that have
    ended, and of others."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server

    def read(self) -> dict[str, float]:
        """Those so far."""
        seconds = dict.fromkeys(("server", "engine", "grammars", "others"), 0.0)
        server = psutil.Process(self._server.pid)
        engine = self._server.engine_pid()
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                if process.pid in (server.pid, engine):
                    seconds["server" if process.pid == server.pid else "engine"] += used.user + used.system
                elif "loraplex.serving.grammar.worker" in process.cmdline():
                    seconds["grammars"] += sum(used[:4])
                else:
                    seconds["others"] += used.user + used.system
        return seconds

    def since(self, before: dict[str, float]) -> dict[str, float]:
        """Those after `before` was read."""
        return {process: now - before[process] for process, now in self.read().items()}
