"""`loraplex doctor`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from support.live_server import Outcome, free_ports, run_command, write_tiny_model

pytestmark = pytest.mark.slow


def doctor(tmp_path: Path, *arguments: str) -> Outcome:
    import sys

    ports = free_ports(2)
    given = ["--port", str(ports[0]), "--admin-port", str(ports[1]), "--data-dir", str(tmp_path / "data")]
    return run_command([sys.executable, "-m", "loraplex.app.cli", "doctor", *given, *arguments])


def lines(outcome: Outcome) -> dict[str, str]:
    """What is checked → "ok" or "wrong"."""
    return {rest.split(":")[0].strip(): verdict for verdict, rest in
            (line.split(maxsplit=1) for line in outcome.stdout.splitlines() if line[:2] in ("ok", "wr"))}  # fmt: skip


def test_all_is_well(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    outcome = doctor(tmp_path, "--model", str(model))
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    names = ["python", "torch", "database", "data directory", "data port", "admin port", "base model"]
    assert lines(outcome) == dict.fromkeys(names, "ok")
    assert "llama, 2 layers" in outcome.stdout
    assert not (tmp_path / "data" / "loraplex.db").exists()


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = doctor(tmp_path, "--model", str(tmp_path / "none"), "--admin-port", str(port))
    assert outcome.code == 1
    wrong = {name for name, verdict in lines(outcome).items() if verdict == "wrong"}
    assert wrong == {"data directory", "admin port", "base model"}
    assert str(port) in outcome.stdout
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_a_wrong_setting(tmp_path: Path) -> None:
    outcome = doctor(tmp_path, "--max-num-seqs", "0")
    assert outcome.code == 1
    assert "--max-num-seqs" in outcome.said[0]
