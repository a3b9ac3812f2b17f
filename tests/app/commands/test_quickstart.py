"""`loraplex quickstart` as a newcomer runs it, on the real model."""

from __future__ import annotations

import fcntl
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from loraplex.app import quickstart
from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    Outcome,
    clean_environment,
    free_ports,
    run_command,
    write_tiny_adapter,
    write_tiny_model,
)
from support.servers.run_here import run_here

pytestmark = pytest.mark.slow

QUICKSTART = [sys.executable, "-m", "loraplex.app.cli", "quickstart"]


class Newcomer:
    """Runs the command on one data directory and two free ports."""

    def __init__(self, root: Path, model: Path) -> None:
        self.data_dir = root / "data"
        self.data_port, self.admin_port = free_ports(2)
        self.arguments = ["--model", str(model), "--adapters-dir", str(EXAMPLE_ADAPTERS)]
        self.arguments += ["--data-dir", str(self.data_dir), "--max-tokens", "24"]
        self.arguments += ["--port", str(self.data_port), "--admin-port", str(self.admin_port)]
        self.environment = {"COLUMNS": "160", "LORAPLEX_THREADS": "1"}

    def run(self) -> Outcome:
        command = [*QUICKSTART, *self.arguments, "--exit"]
        given = {"LORAPLEX_ENGINE_SPARE": "false", **self.environment}
        return run_command(command, environment=given, timeout=280)

    def fails(self, *extra: str, **environment: str) -> str:
        """What the command says in this process, where it starts a server that does not get ready, or is refused."""
        given = {"LORAPLEX_ENGINE_SPARE": "false", **self.environment, **environment}
        outcome = run_here("quickstart", *self.arguments, "--exit", *extra, environment=given)
        assert outcome.code == 1, outcome.stdout + outcome.stderr
        (line,) = outcome.said
        assert line.startswith("loraplex: ")
        return line

    def key(self) -> str:
        return (self.data_dir / "quickstart-key").read_text().strip()


@pytest.fixture
def newcomer(real_model_dir: Path, tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path, real_model_dir)


@pytest.fixture
def hurried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Newcomer]:
    """For runs that end before any answer: its model loads in a moment, and its kernels need not be compiled."""
    monkeypatch.delenv("MAKELEVEL", raising=False)
    # Children inherit nohup's, which ignores it.
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    newcomer = Newcomer(tmp_path, write_tiny_model(tmp_path / "tiny"))
    newcomer.environment["LORAPLEX_KERNELS"] = "torch"
    yield newcomer
    signal.signal(signal.SIGHUP, hang_up)


def nothing_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_first_run_and_a_second_one(newcomer: Newcomer) -> None:
    first = newcomer.run()
    assert first.code == 0, first.stdout + first.stderr
    for step in range(1, 6):
        assert f"{step}/5" in first.stdout
    for name in ("json", "pirate", "sentiment"):
        assert f"{name}: accepted as v1" in first.stdout
        assert f"{name}@v1" in first.stdout
    assert "Arr" in first.stdout
    assert '{"topic"' in first.stdout
    key = newcomer.key()
    assert f"curl http://127.0.0.1:{newcomer.data_port}/v1/chat/completions" in first.stdout
    assert key in first.stdout
    assert (newcomer.data_dir / "quickstart-key").stat().st_mode & 0o077 == 0
    assert (newcomer.data_dir / "server.log").stat().st_mode & 0o077 == 0
    assert nothing_listens(newcomer.data_port)

    # A second one has all that, and stays up until Ctrl-C; its curl line works.
    with stay_up(newcomer) as process:
        output = ""
        assert process.stdout is not None
        while "Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        assert output.count("already there as v1") == 3
        assert "accepted" not in output
        assert newcomer.key() == key
        # The answers are the same too.
        assert table(output) == table(first.stdout)

        # What it prints for a second terminal works there.
        for line in (
            "export LORAPLEX_URL=",
            "chat -m pirate",
            "export LORAPLEX_ADMIN_URL=",
            "tenant create acme",
        ):
            assert line in output
        program = str(Path(sys.executable).with_name("loraplex"))
        commands = [line.strip() for line in output.splitlines() if line.startswith("  ")]
        exports = [line for line in commands if line.startswith("export ")]
        (chat,) = [line for line in commands if " chat " in line]
        (create,) = [line for line in commands if line.endswith("tenant create acme")]
        chat += " --temperature 0"  # one sampled answer in some hundreds begins with another word
        for export, command, said in ((exports[0], chat, "Arr"), (exports[1], create, "tenant acme created")):
            script = f"{export}\n{command.replace(command.split()[0], program, 1)}"
            asked = run_command(["sh", "-c", script], environment=newcomer.environment, timeout=120)
            assert said in asked.stdout, asked.stdout + asked.stderr

        body = re.search(r"-d '(.*)'", output)
        assert body is not None
        answer = httpx.post(
            f"http://127.0.0.1:{newcomer.data_port}/v1/chat/completions",
            content=body.group(1),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 200
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 4, "the server, the engine, its spare, and what checks grammars"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        _, alive = psutil.wait_procs(family, timeout=60)
        assert alive == []


def table(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("│")]


class stay_up:
    """The command without --exit, killed at the end with all that it started."""

    def __init__(self, newcomer: Newcomer) -> None:
        self.process = subprocess.Popen(
            [*QUICKSTART, *newcomer.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment({**newcomer.environment, "PYTHONUNBUFFERED": "1"}),
            start_new_session=True,
        )

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            for process in (psutil.Process(self.process.pid), *family):
                process.kill()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGHUP])
def test_no_server_stays_behind_where_a_start_is_stopped(hurried: Newcomer, number: signal.Signals) -> None:
    with stay_up(hurried) as process:
        assert process.stdout is not None
        while "2/5" not in (line := process.stdout.readline()):
            assert line
        family = wait_for_children(process.pid)
        process.send_signal(number)
        assert process.wait(60) == 130, process.stdout.read()
        assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_signal_stops_a_start_where_python_makes_another_error_of_it(hurried: Newcomer) -> None:
    """As it comes while an import defines an enumeration: Python 3.11 raises a RuntimeError then."""
    program = """
import os, signal, sys, httpx
class Late:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGHUP)
httpx.get = lambda *args, **options: type("Owner", (), {"late": Late()})
from loraplex.app.cli import main
sys.argv = ["loraplex", "quickstart", *sys.argv[1:]]
main()
"""
    environment = clean_environment(hurried.environment)
    command = [sys.executable, "-c", program, *hurried.arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 130, done.stdout + done.stderr


def wait_for_children(pid: int) -> list[psutil.Process]:
    end = time.monotonic() + 30
    while not (children := psutil.Process(pid).children(recursive=True)):
        assert time.monotonic() < end, "no server was started"
        time.sleep(0.01)
    return children


def test_a_port_in_use(hurried: Newcomer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", hurried.admin_port))
        taken.listen()
        said = hurried.fails(MAKELEVEL="1")
        assert f"port {hurried.admin_port} on 127.0.0.1 cannot be used (Address already in use)" in said
        assert str(hurried.data_port) not in said
        others = re.search(r'make quickstart ARGS="--port (\d+) --admin-port (\d+)"$', said)
        assert others is not None
        assert all(nothing_listens(int(port)) for port in others.groups())
        assert "or say: loraplex quickstart --port " in hurried.fails()


def test_a_data_directory_in_use(hurried: Newcomer) -> None:
    hurried.data_dir.mkdir()
    with open(hurried.data_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = hurried.fails()
    assert f"a server uses the data directory {hurried.data_dir}" in said
    assert said.endswith(f"say: loraplex quickstart --data-dir {hurried.data_dir}-2")


def test_a_server_that_dies_while_it_starts(hurried: Newcomer) -> None:
    said = hurried.fails(LORAPLEX_MAX_NUM_SEQS="0")
    assert "LORAPLEX_MAX_NUM_SEQS" in said  # the server's own last word
    hurried.data_dir.mkdir(exist_ok=True)
    (hurried.data_dir / "loraplex.db").write_text("no database" * 100)
    assert "loraplex.db" in hurried.fails()


def test_no_adapters(hurried: Newcomer, tmp_path: Path) -> None:
    said = hurried.fails("--adapters-dir", str(tmp_path))
    assert str(tmp_path) in said
    assert "--adapters-dir" in said


def test_an_adapter_that_is_refused(hurried: Newcomer, tmp_path: Path) -> None:
    tensors = write_tiny_adapter(tmp_path / "adapters" / "json") / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1000])
    said = hurried.fails("--adapters-dir", str(tmp_path / "adapters"))
    assert "uploading 'json'" in said
    assert "422" in said
    assert nothing_listens(hurried.data_port)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_is_heeded_that_comes_while_python_frees_an_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops an exception that is raised there, and the start would go on."""
    asked = 0

    class Freed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def get(*_: object, **__: object) -> httpx.Response:
        nonlocal asked
        asked += 1
        Freed()
        raise httpx.ConnectError("not yet")

    monkeypatch.setattr(quickstart.httpx, "get", get)
    port, admin_port = free_ports(2)
    options = quickstart.QuickstartOptions(
        str(write_tiny_model(tmp_path / "model")),
        EXAMPLE_ADAPTERS,
        tmp_path / "data",
        "127.0.0.1",
        port,
        admin_port,
        question="x",
        max_tokens=1,
        exit_after=True,
    )
    before = set(psutil.Process().children())  # multiprocessing of other tests leaves its resource tracker
    with pytest.raises(SystemExit) as stopped:
        quickstart.run_quickstart(options, Console(quiet=True))
    assert (stopped.value.code, asked) == (quickstart.STOPPED_EXIT_CODE, 1)
    assert set(psutil.Process().children()) - before == set()
