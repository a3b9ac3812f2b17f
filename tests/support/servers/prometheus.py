"""A real Prometheus for tests, and its promtool: Debian's package `prometheus`, never its service."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import pytest
import yaml

from support.servers.live_server import free_ports

INSTALL = "apt-get install --no-install-recommends prometheus"


def need_program(name: str) -> str:
    """`prometheus` or `promtool`. Skips the test where it is missing; fails it in CI, where it must not be."""
    program = shutil.which(name)
    if program is None:
        message = f"{name} is not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return program


def promtool(*arguments: str | Path) -> str:
    """What it says; fails the test where it finds a fault."""
    command = [need_program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Prometheus:
    """Scrapes `targets` (host:port) every second, each with the labels given. A context manager."""

    def __init__(self, directory: Path, targets: Mapping[str, Mapping[str, str]], job: str) -> None:
        self._program = need_program("prometheus")
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        static = [{"targets": [target], "labels": dict(labels)} for target, labels in targets.items()]
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [{"job_name": job, "static_configs": static}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def __enter__(self) -> Prometheus:
        command = [
            self._program,
            f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--query.lookback-delta=10s",
        ]
        with open(self._directory / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > end:
                log_text = (self._directory / "log").read_text()
                self.__exit__(None, None, None)
                raise AssertionError(log_text)
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)

    def _ready(self) -> bool:
        try:
            return self.http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of now, one entry a series; fails where it is no PromQL."""
        return self._result("/api/v1/query", query=expression)

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """A matrix; times in seconds since the epoch."""
        return self._result("/api/v1/query_range", query=expression, start=start, end=end, step=step)

    def label_values(self, label: str, *match: str) -> Sequence[str]:
        answer = self.http.get(f"/api/v1/label/{label}/values", params={"match[]": list(match)})
        assert answer.status_code == 200, answer.text
        found: list[str] = answer.json()["data"]
        return found

    def _result(self, path: str, **parameters: Any) -> list[dict[str, Any]]:
        answer = self.http.post(path, data=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found
