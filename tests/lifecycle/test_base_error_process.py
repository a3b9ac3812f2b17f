"""The process that measures: what it answers, and what becomes of one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from loraplex.adapters.admission.trained_base import NF4
from loraplex.adapters.base_weights.nf4 import quantise_nf4
from loraplex.adapters.errors import AdapterRefused
from loraplex.engine.base_error.__main__ import measure
from loraplex.engine.base_error.comparison import NotMeasured, compare_answers, read_subject
from loraplex.engine.base_error.messages import BaseErrorFigures, BaseErrorTask
from loraplex.engine.base_error.prompts import prompt_tokens
from loraplex.lifecycle.base_errors import measure_in_process
from support.adapters.drafts import draft_adapter, write_base
from support.adapters.peft_zoo import PeftReference
from support.http.admin_plane import ARCH, AdminPlane, admin_client

TASK = BaseErrorTask("/no/base", "none", NF4, "/no/config", "/no/tensors", "0" * 64, 8, [[1, 2]])


AT_ONCE = (
    sys.executable,
    "-c",
    "import os; os.nice = lambda by: 0; from loraplex.engine.base_error.__main__ import main; main()",
)
"""The process, at the priority of the tests: beside them it would wait for minutes."""


def script(code: str) -> tuple[str, ...]:
    """A process in place of the one that measures; FD is its pipe."""
    return sys.executable, "-c", f"import os, sys, time; FD = int(sys.argv[1]); {code}"


async def answer_of(code: str, **options: Any) -> BaseErrorFigures:
    return await measure_in_process(TASK, command=script(code), **options)


async def test_the_task_goes_in_and_the_figures_come_out() -> None:
    found = await answer_of(
        "import json; task = json.load(sys.stdin); os.write(FD, json.dumps({'kl': 0.5, 'top1': 0.25, "
        "'tokens': len(task['prompts'][0])}).encode())"
    )
    assert found == BaseErrorFigures(0.5, 0.25, 2)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL, without an answer"),
        ("sys.exit(3)", "ended with 3, without an answer"),
        ("os.write(FD, b'{\"kl\": ')", "without an answer"),
        ("os.write(FD, b'[]')", "without an answer"),
        ("os.close(FD)", "without an answer"),
    ],
)
async def test_a_process_that_breaks_is_a_reason(code: str, reason: str) -> None:
    found = await answer_of(code)
    assert found.kl is None
    assert reason in str(found.reason)


async def test_one_that_cannot_start_is_a_reason() -> None:
    found = await measure_in_process(TASK, command=["/no/such/program"])
    assert found.reason == "the process that measures did not start: No such file or directory"


async def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    marked = f"time.sleep(600)  # {tmp_path}"
    found = await answer_of(marked, limit_s=2.0)
    assert found.reason == "the measurement took longer than 2 s"
    # Also one that had not come to its first line by then.
    assert not [child for child in psutil.Process().children() if marked in "".join(child.cmdline())]


async def test_one_that_nobody_waits_for_any_more_is_ended(tmp_path: Path) -> None:
    began = tmp_path / "pid"
    scratch = f"{began}.new"
    code = f"open({scratch!r}, 'w').write(str(os.getpid())); os.rename({scratch!r}, {str(began)!r}); time.sleep(600)"
    waiting = asyncio.create_task(answer_of(code))
    async with asyncio.timeout(60):
        while not began.exists():
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


async def test_it_sees_no_secret_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ADMIN_TOKEN", "secret")
    found = await answer_of(
        "import json; os.write(FD, json.dumps({'reason': str(sorted(os.environ))}).encode())"
    )
    assert "LORAPLEX_ADMIN_TOKEN" not in str(found.reason)
    assert "HF_HUB_OFFLINE" in str(found.reason)


@pytest.mark.slow
async def test_it_runs_at_the_lowest_priority_and_dies_first() -> None:
    code = (
        "import sys; from loraplex.engine.base_error import __main__ as child; "
        "from loraplex.engine.base_error.messages import BaseErrorFigures; "
        "child.measure = lambda task: BaseErrorFigures("
        "reason=f\"{os.nice(0)} {open('/proc/self/oom_score_adj').read().strip()}\"); child.main()"
    )
    assert (await answer_of(code)).reason == "19 1000"


def task_of(folder: Path, **changes: Any) -> BaseErrorTask:
    base = write_base(folder / "base", ARCH)
    draft_adapter(ARCH, base_model_name_or_path="org/base-bnb-4bit").write(folder / "adapter")
    return BaseErrorTask(
        **{
            "model_dir": str(base),
            "quantise": "none",
            "trained_on": NF4,
            "config_path": str(folder / "adapter/adapter_config.json"),
            "tensors_path": str(folder / "adapter/adapter_model.safetensors"),
            "digest": "0" * 64,
            "max_rank": 64,
            "prompts": prompt_tokens(lambda text: [byte % ARCH.vocab for byte in text.encode()]),
        }
        | changes
    )


def test_too_little_memory_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="MiB of memory, and may take 64 MiB"):
        compare_answers(read_subject(task_of(tmp_path)), 64 << 20)


@pytest.mark.slow
async def test_more_memory_than_was_planned_ends_at_the_limit(tmp_path: Path) -> None:
    """A measurement that needs 4 GiB, by another `compare_answers`."""
    allowed = "BaseErrorTask('', 'none', '', '', '', '', 1, [], memory=300 << 20)"
    code = (
        "import msgspec, torch; from loraplex.engine.base_error import __main__ as child; "
        "from loraplex.engine.base_error.messages import BaseErrorTask; "
        "child.read_subject = lambda task: task; "
        "child.compare_answers = lambda task, memory: torch.ones(1 << 30) and None; "
        f"os.write(FD, msgspec.json.encode(child.measure({allowed})))"
    )
    found = await answer_of(code)
    assert found.reason == "it takes more than the 300 MiB of memory that it may take"


@pytest.mark.parametrize("value", [np.nan, 1e30])
def test_a_hostile_adapter_is_a_reason(value: float, tmp_path: Path) -> None:
    task = task_of(tmp_path)
    path = Path(task.tensors_path)
    tensors = load_arrays(path)
    save_arrays({name: np.full_like(array, value) for name, array in tensors.items()}, path)
    with pytest.raises((NotMeasured, AdapterRefused), match="finite"):
        compare_answers(read_subject(task), 1 << 30)


def test_files_that_are_gone_are_a_reason(tmp_path: Path) -> None:
    found = measure(task_of(tmp_path, tensors_path=str(tmp_path / "none")))
    assert found.reason == "the adapter's file none is missing"


def test_a_reason_names_no_folder_of_the_server(tmp_path: Path) -> None:
    found = measure(task_of(tmp_path, model_dir=str(tmp_path / "private")))
    assert found.reason == "the measurement failed; the server's log says why"


@pytest.fixture
def measuring(tmp_path: Path) -> Any:
    """A plane whose versions are measured by the process."""
    made = AdminPlane(tmp_path, measure_base=partial(measure_in_process, command=AT_ONCE), wait_s=120.0)
    yield made
    made.close()


@pytest.mark.slow
async def test_an_upload_has_the_figures_of_peft(measuring: AdminPlane, tmp_path: Path) -> None:
    folder = tmp_path / "upload"
    draft_adapter(ARCH, base_model_name_or_path="org/base-bnb-4bit").write(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    measuring.make_tenant()
    async with admin_client(measuring.app) as client:
        answer = await client.post("/tenants/acme/adapters/support/versions", files=files)
    report = answer.json()["report"]
    served = Path(measuring.validation.base.model_dir)
    trained = tmp_path / "trained"
    trained.mkdir()
    (trained / "config.json").write_bytes((served / "config.json").read_bytes())
    tensors = {name: tensor.float() for name, tensor in load_file(served / "model.safetensors").items()}
    made = {
        name: torch.from_numpy(quantise_nf4(tensor.numpy())) if name.endswith("_proj.weight") else tensor
        for name, tensor in tensors.items()
    }
    save_file(made, trained / "model.safetensors", {"format": "pt"})
    prompts = prompt_tokens(lambda text: [byte % ARCH.vocab for byte in text.encode()])
    p, q = (
        torch.cat([reference.logits("a", ids) for ids in prompts]).double().log_softmax(-1)
        for reference in (PeftReference(base, {"a": folder}, torch.float32) for base in (trained, served))
    )
    assert report["base_error"] == {
        "trained_on": NF4,
        "served": "full precision",
        "reason": None,
        "kl": pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3),
        "top1": pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean())),
        "tokens": 256,
    }
    assert report["base_error"]["kl"] > 1e-4
    json.dumps(report)
