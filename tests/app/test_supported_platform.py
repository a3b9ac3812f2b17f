"""Where a server runs, and what the program does elsewhere."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from loraplex.app.cli import create_cli
from support.servers.live_server import EXAMPLE_ADAPTERS

ELSEWHERE = """
import os, platform, sys
platform.system = lambda: "Windows"
for name in ("fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules[name] = None
for name in "fdatasync posix_fallocate sched_getaffinity confstr O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY".split():
    delattr(os, name)
from loraplex.app.cli import main
sys.argv = ["loraplex", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "numba", "sqlalchemy", "starlette", "transformers", "uvicorn"} & set(sys.modules)
    assert not heavy, heavy
"""
CLIENTS = (
    "--version",
    "tenant list",
    "key list --tenant acme",
    "adapter list --tenant acme",
    f"adapter push json {EXAMPLE_ADAPTERS / 'json'} --tenant acme",
    "release show support --tenant acme",
    "usage",
    "audit list",
    "chat -m support hello",
)


@pytest.mark.parametrize("command", ["serve", "quickstart", "doctor"])
@pytest.mark.parametrize(
    ("system", "machine", "found"),
    [
        ("Darwin", "arm64", "macOS on arm64"),
        ("Windows", "AMD64", "Windows on AMD64"),
        ("Linux", "riscv64", "Linux on riscv64"),
    ],
)
def test_server_commands_end_with_one_line_elsewhere(
    command: str, system: str, machine: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert f"with glibc is needed, and this is {found}." in refusal(command)


def test_musl(monkeypatch: pytest.MonkeyPatch) -> None:
    def confstr(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", confstr)
    assert (
        "this is Linux on x86_64 with another C library" in refusal("serve") or platform.machine() != "x86_64"
    )


def refusal(command: str) -> str:
    done = CliRunner().invoke(create_cli(command), [command])
    assert done.exit_code == 1, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("loraplex: Linux on x86-64 or aarch64")
    return line


@pytest.mark.parametrize("line", CLIENTS)
def test_clients_need_nothing_of_linux(line: str) -> None:
    done = elsewhere(*line.split())
    assert "Traceback" not in done.stderr
    if line.startswith("--") or line.endswith("--help"):
        assert done.returncode == 0, done.stderr
    else:
        assert "127.0.0.1:9" in done.stderr, "it asked for the server, which is not there"


def test_nothing_heavy_is_imported_before_the_refusal() -> None:
    for command in ("serve", "quickstart", "doctor"):
        done = elsewhere(command)
        assert done.returncode == 1
        (said,) = done.stderr.splitlines()
        assert "is needed" in said


def elsewhere(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = {"LORAPLEX_ADMIN_URL": "http://127.0.0.1:9", "LORAPLEX_ADMIN_TOKEN": "token"}
    given |= {"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_API_KEY": "lpx_key"}
    return subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *arguments],
        env=os.environ | given,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
