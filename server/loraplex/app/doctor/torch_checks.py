"""Doctor's checks of torch, in a process of its own: importing torch would cost doctor's own process its memory, and
each process that does so a second or two."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from loraplex.engine.model.model_plan import ModelPlan

NAMES = ("torch", "device", "kernels", "speculation", "model", "untested")
"""Names of the answers."""
_SECONDS = 900
"""Kernels may be compiled meanwhile, and scales are read of every linear."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Settings by their names; `model_dir` None where there is no model to look at."""

    device: str
    dtype: str
    quantise: str
    kv_cache_dtype: str
    kernels: str
    attention: str
    threads: int
    max_model_len: int
    batch_invariant: bool
    speculation: Literal["auto", "off"]
    model_dir: str | None


class Answers:
    """The results for each of `NAMES`. The process runs at the first call."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._found: dict[str, dict[str, str]] | None = None

    def __getitem__(self, name: str) -> str:
        """Raises OSError with what is wrong."""
        if self._found is None:
            self._found = _ask(self._questions)
        answer = self._found[name]
        if "wrong" in answer:
            raise OSError(answer["wrong"])
        return answer["ok"]


def _ask(questions: Questions) -> dict[str, dict[str, str]]:
    command = [sys.executable, "-m", "loraplex.app.doctor.torch_checks", json.dumps(asdict(questions))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        return {name: {"wrong": f"the checks of torch took more than {_SECONDS} s"} for name in NAMES}
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]
        return {name: {"wrong": reason} for name in NAMES}
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _answer(questions: Questions) -> dict[str, dict[str, str]]:
    plan = cache(lambda: _plan(questions))
    checks = {
        "torch": _torch,
        "device": lambda: _device(questions),
        "kernels": lambda: _kernels(questions),
        "speculation": lambda: _speculation(questions),
        "model": lambda: _model(plan()),
        "untested": lambda: _untested(plan()),
    }
    return {name: _told(check) for name, check in checks.items()}


def _told(check: Callable[[], str]) -> dict[str, str]:
    from loraplex.adapters.errors import LoraplexError

    try:
        return {"ok": check()}
    except LoraplexError as error:
        return {"wrong": error.message}
    except Exception as error:  # the doctor reports every failure
        return {"wrong": traceback.format_exception_only(error)[-1].strip()}


def _torch() -> str:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    capability = torch.backends.cpu.get_cpu_capability()
    versions = f"{torch.__version__}, transformers {version('transformers')}"
    return f"{versions}, device {device} ({capability})"


def _device(questions: Questions) -> str:
    """`cpu`, or `cuda` and the bytes of its memory."""
    import torch

    from loraplex.engine.devices import resolve_device

    device = resolve_device(questions.device)
    if device.type == "cpu":
        return "cpu"
    return f"cuda {torch.cuda.mem_get_info(device)[1]}"


def _kernels(questions: Questions) -> str:
    from loraplex.engine.kernel_report import describe_kernels

    return describe_kernels(questions.kernels, questions.device, questions.threads)


def _speculation(questions: Questions) -> str:
    from loraplex.engine.kernel_report import describe_speculation

    return describe_speculation(questions.speculation, questions.kernels, questions.device)


def _plan(questions: Questions) -> ModelPlan | None:
    from loraplex.engine.devices import choose_kernels
    from loraplex.engine.model.model_plan import ModelSettings, make_plan

    if questions.model_dir is None:
        return None
    kernels = choose_kernels(questions.device, questions.kernels, batch_invariant=questions.batch_invariant)
    return make_plan(Path(questions.model_dir), ModelSettings.of(questions), kernels)


def _model(plan: ModelPlan | None) -> str:
    from loraplex.engine.model.outline import examine_tensors

    if plan is None:
        return ""
    examine_tensors(plan)
    return plan.explain()


def _untested(plan: ModelPlan | None) -> str:
    """The model type, where only the start can tell whether it is served."""
    return plan.model_type if plan is not None and plan.untested else ""


if __name__ == "__main__":
    print(json.dumps(_answer(Questions(**json.loads(sys.argv[1])))))
