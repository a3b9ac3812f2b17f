"""With --rerun-failed, a test that fails is run once more, alone, after all others.

If it passes then, the run passes, and ends with a line `flaky: NAME`. More than MAX_RERUNS failures are no chance, and
neither is a process that crashed: then nothing is run again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MAX_RERUNS = 5


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rerun-failed", action="store_true", help="run a failed test once more, alone: it may be flaky"
    )


def register(config: pytest.Config) -> None:
    """Call from `pytest_configure`. The processes of pytest-xdist only run what they are given."""
    if config.getoption("--rerun-failed") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RerunFailed(config))


class RerunFailed:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, None] = {}
        self._crashed = False
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[_node(report.nodeid)] = None
            self._crashed |= report.when not in ("setup", "call", "teardown")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or self._crashed:
            return
        if not 0 < len(self._failed) <= MAX_RERUNS:
            return
        for node in self._failed:
            print(f"\nonce more, alone: {node}", flush=True)
            options = ["-q", "-n", "0", *(["--soak"] if self._config.getoption("--soak", False) else [])]
            command = [sys.executable, "-m", "pytest", *options, node]
            if subprocess.run(command, cwd=self._config.rootpath, check=False).returncode == 0:
                self._flaky.append(node)
        if len(self._flaky) == len(self._failed):
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        for node in self._flaky:
            print(f"flaky: {node}", flush=True)


def _node(nodeid: str) -> str:
    """The name without the group that pytest-xdist appends. An "@" in a parameter names none."""
    group = nodeid.rfind("@")
    return nodeid[:group] if group > nodeid.rfind("]") and "::" in nodeid[:group] else nodeid
