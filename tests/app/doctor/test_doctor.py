"""`loraplex doctor`, in this process except in the first test."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
from pathlib import Path

import pytest

from loraplex.app.doctor import torch_checks
from loraplex.app.doctor.checks import check_tokenizer
from loraplex.app.settings import Settings
from loraplex.migrations.run import upgrade
from support.models.checkpoints import edit_config
from support.models.tiny_families import save_family
from support.models.tokenizer_folders import write_folder
from support.servers.live_server import Outcome, free_ports, run_command, write_tiny_model
from support.servers.run_here import run_here

pytestmark = pytest.mark.slow


MACHINE = frozenset({"memory", "data directory", "artifact store", "open files", "huge pages", "time"})
"""Checks that say what the machine of the tests is like."""


def options(tmp_path: Path) -> list[str]:
    ports = free_ports(2)
    return ["--port", str(ports[0]), "--admin-port", str(ports[1]), "--data-dir", str(tmp_path / "data")]


def doctor(tmp_path: Path, *arguments: str) -> Outcome:
    return run_here("doctor", *options(tmp_path), *arguments)


@pytest.fixture
def torch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process answers what is asked of torch, which it has imported."""
    monkeypatch.setattr(torch_checks, "_ask", torch_checks._answer)


def lines(outcome: Outcome) -> dict[str, str]:
    """What is checked → "ok", "warn" or "wrong"."""
    found = {}
    for line in outcome.stdout.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("ok", "warn", "wrong"):
            found[rest.partition(":")[0].strip()] = verdict
    return found


def test_all_is_well(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    program = [sys.executable, "-m", "loraplex.app.cli", "doctor", *options(tmp_path)]
    outcome = run_command([*program, "--model", str(model)])
    assert outcome.code == 0, outcome.stdout + outcome.stderr
    names = [
        "python",
        "torch",
        "kernels",
        "speculation",
        "database",
        "database clock",
        "redis",
        "memory",
        "data directory",
        "artifact store",
        "secrets",
        "open files",
        "huge pages",
        "time",
        "data port",
        "admin port",
        "base model",
        "tokenizer",
        "end of a turn",
        "generation config",
    ]
    found = lines(outcome)
    assert list(found) == names
    # What this machine is like is not the test's to choose.
    assert {name for name, verdict in found.items() if verdict != "ok"} <= MACHINE
    assert "wrong" not in found.values()
    assert "llama on the fused decoder" in outcome.stdout
    assert "attention numba (it goes with numba's other kernels)" in outcome.stdout
    assert ", the same bits in every batch, " in outcome.stdout
    assert ", 2 layers" in outcome.stdout
    assert not (tmp_path / "data" / "loraplex.db").exists()


def test_a_tokenizer_with_two_readings_is_told_with_an_example(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    write_folder(model, "Qwen2Tokenizer", with_config=False)
    settings = Settings(tokenizer="file", data_dir=tmp_path)
    found = check_tokenizer(settings, model)
    assert found.status == "warn"
    expected = "'2026' is '202' '6' by tokenizer.json and '2' '0' '2' '6' by transformers' Qwen2Tokenizer"
    assert expected in found.found
    assert "--tokenizer file serves" in found.found


def kernels(outcome: Outcome) -> str:
    (said,) = [line for line in outcome.stdout.splitlines() if " kernels: " in line]
    return said


def test_doctor_names_kernels_and_their_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    said = kernels(doctor(tmp_path, "--device", "cpu", "--threads", "1"))
    (kept,) = (tmp_path / "kernels").iterdir()
    assert said.startswith("ok    kernels: numba for ")
    assert said.endswith(f", 1 thread; to be compiled at the first start (10 to 20 s), kept in {kept}")


def doctor_for_an_old_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Outcome:
    with monkeypatch.context() as pretended:
        pretended.setenv("NUMBA_CPU_NAME", "generic")
        pretended.setenv("NUMBA_CPU_FEATURES", "")
        pretended.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        return doctor(tmp_path, "--device", "cpu", *arguments)


def test_kernels_that_cannot_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    outcome = doctor(tmp_path, "--device", "cpu", "--kernels", "triton")
    assert outcome.code == 1
    assert kernels(outcome).startswith("wrong kernels: --kernels triton: the triton kernels can't run here: ")


def test_a_dtype_that_the_processor_cannot_multiply_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    outcome = doctor_for_an_old_processor(tmp_path, monkeypatch, "--model", str(model))
    assert "float32 (this processor cannot multiply in bfloat16, the checkpoint's dtype)" in outcome.stdout
    # What is made for another processor is no use on this one.
    assert "oneDNN's linears" in kernels(outcome)


@pytest.mark.usefixtures("torch_here")
def test_whether_bits_depend_on_the_batch(tmp_path: Path) -> None:
    model = ("--model", str(write_tiny_model(tmp_path / "tiny")), "--device", "cpu", "--kernels", "torch")
    assert "bits that may depend on the batch (torch's kernels " in doctor(tmp_path, *model).stdout
    refused = doctor(tmp_path, *model, "--batch-invariant")
    assert "wrong base model: --batch-invariant: torch's kernels" in refused.stdout


@pytest.mark.usefixtures("torch_here")
def test_what_is_served_for_certain_is_told_from_what_the_start_decides(tmp_path: Path) -> None:
    """A family that is known to be refused is wrong here too, in the words of the start."""
    untested = write_tiny_model(tmp_path / "untested")
    edit_config(untested, model_type="stablelm", architectures=["StableLmForCausalLM"])
    outcome = doctor(tmp_path, "--model", str(untested), "--device", "cpu", "--kernels", "torch")
    assert lines(outcome)["base model"] == "warn"
    assert "stablelm is not on the list of tested architectures: the start compares" in outcome.stdout
    refused = write_tiny_model(tmp_path / "refused")
    edit_config(refused, model_type="mimo_v2_flash")
    outcome = doctor(tmp_path, "--model", str(refused))
    assert outcome.code == 1
    said = "MiMo-V2-Flash is not served: its values are narrower than its keys"
    assert f"wrong base model: {said}" in outcome.stdout
    served = run_here("serve", *options(tmp_path), "--model", str(refused))
    assert served.code == 1
    assert f"loraplex: {said}" in served.stderr


@pytest.mark.usefixtures("torch_here")
@pytest.mark.parametrize(("family", "is_said"), [("phimoe", True), ("qwen3_moe", False)])
def test_a_mixture_whose_experts_take_no_adapters_is_told(family: str, is_said: bool, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "model")
    outcome = doctor(tmp_path, "--model", str(model), "--device", "cpu", "--kernels", "torch")
    told = "LoRA on its routed experts is not served (on the other linears it is)"
    assert (told in outcome.stdout) == is_said, outcome.stdout


@pytest.mark.usefixtures("torch_here")
def test_nothing_that_lasts_is_changed(tmp_path: Path) -> None:
    """Of an installation with its database, secrets and store; twice, as the first look may leave something."""
    data = tmp_path / "data"
    upgrade(f"sqlite:///{make(data)}/loraplex.db")
    for name in ("staging", "sha256"):
        (data / "artifacts" / name).mkdir(parents=True)
    (data / "key-pepper").write_text("ab" * 32)
    (data / "key-pepper").chmod(0o640)

    def everything() -> dict[Path, bytes]:
        return {path: b"" if path.is_dir() else path.read_bytes() for path in (data, *data.rglob("*"))}

    before = everything()
    for _ in range(2):
        outcome = doctor(tmp_path, "--device", "cpu", "--kernels", "torch", "--json")
        found = {check["name"]: check for check in json.loads(outcome.stdout)["checks"]}
        assert found["secrets"]["status"] == "fail"
        assert found["secrets"]["remedy"].startswith(f"chmod 600 {data / 'key-pepper'}")
        assert "schema 0020" in found["database"]["detail"]
        assert " a sync takes " in found["data directory"]["detail"]
    assert everything() == before


def make(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.usefixtures("torch_here")
def test_a_data_directory_that_a_server_holds(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with open(data / "lock", "w") as lock, socket.socket() as taken:
        fcntl.flock(lock, fcntl.LOCK_EX)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        outcome = doctor(tmp_path, "--device", "cpu", "--kernels", "torch", "--port", port)
    assert "in use by a running server" in outcome.stdout
    # The port of a server that runs is nothing wrong.
    assert f"127.0.0.1:{port} is in use" in outcome.stdout
    assert lines(outcome)["data port"] == "ok"
    assert "torch, as was asked for" in kernels(outcome)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").write_text("a file")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "data"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = doctor(
            tmp_path, "--model", str(tmp_path / "none"), "--admin-port", str(port), "--device", "cpu"
        )
    assert outcome.code == 1
    wrong = {name for name, verdict in lines(outcome).items() if verdict == "wrong"}
    assert {"data directory", "artifact store", "admin port", "base model"} <= wrong
    assert wrong <= {"admin port", "base model", *MACHINE}
    assert str(port) in outcome.stdout
    assert "compiled at every start" in kernels(outcome)
    assert "Traceback" not in outcome.stdout + outcome.stderr


@pytest.mark.usefixtures("torch_here")
def test_a_model_that_cannot_be_served_is_told_in_one_line(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mllama", "vision_config": {}}))
    outcome = doctor(tmp_path, "--model", str(model))
    assert outcome.code == 1
    (said,) = [line for line in outcome.stdout.splitlines() if line.startswith("wrong")]
    assert said.startswith("wrong base model: mllama is multimodal")
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_a_wrong_setting(tmp_path: Path) -> None:
    outcome = doctor(tmp_path, "--max-num-seqs", "0")
    assert outcome.code == 1
    assert "--max-num-seqs" in outcome.said[0]


@pytest.mark.usefixtures("torch_here")
def test_as_json(tmp_path: Path) -> None:
    outcome = doctor(tmp_path, "--json", "--model", str(tmp_path / "missing"), "--no-metrics-on-data-port")
    assert outcome.code == 1
    shown = json.loads(outcome.stdout)
    assert shown["ok"] is False
    assert all(check["ok"] == (check["status"] != "fail") for check in shown["checks"])
    verdicts = {check["name"]: check["ok"] for check in shown["checks"]}
    assert (verdicts["python"], verdicts["base model"]) == (True, False)
    (detail,) = (check["detail"] for check in shown["checks"] if check["name"] == "base model")
    assert "missing" in detail
