"""Doctor's checks of torch, in a process of its own: importing torch would cost doctor's own process its memory, and
each process that does so a second or two."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

NAMES = ("torch", "device", "kernels", "speculation", "model", "untested")
"""Names of the answers."""
_SECONDS = 900
"""Kernels may be compiled meanwhile, and scales are read of every linear."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Settings by their names; `model_dir` None where there is no model to look at."""

    device: str
    dtype: str
    quantise: bool
    kv_codes: bool
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
    checks = {
        "torch": _torch,
        "device": lambda: _device(questions),
        "kernels": lambda: _kernels(questions),
        "speculation": lambda: _speculation(questions),
        "model": lambda: _model(questions),
        "untested": lambda: _untested(questions),
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


def _model(questions: Questions) -> str:
    from loraplex.engine.devices import choose_kernels, refuse_bits
    from loraplex.engine.model.loading import (
        examine_attention,
        examine_codes,
        examine_dtype,
        examine_model,
        examine_same_bits,
        read_model_config,
        serving_dtype,
    )
    from loraplex.engine.model.outline import examine_tensors

    if questions.model_dir is None:
        return ""
    model_dir = Path(questions.model_dir)
    kind = examine_model(model_dir, questions.max_model_len)
    kernels = choose_kernels(questions.device, questions.kernels, batch_invariant=questions.batch_invariant)
    examine_codes(model_dir, questions.quantise)
    served = serving_dtype(*read_model_config(model_dir), questions.dtype, kernels)
    obstacle = kernels.obstacle_to_same_bits(served, kernels.batch_invariant)
    if obstacle is not None and questions.batch_invariant:
        raise refuse_bits(obstacle)
    obstacle = examine_same_bits(model_dir, questions.batch_invariant) or obstacle
    bits = "the same bits in every batch"
    if obstacle is not None:
        bits = f"bits that may depend on the batch ({obstacle})"
    attention = examine_attention(
        model_dir, questions.attention, kernels, served, kv_codes=questions.kv_codes
    )
    dtype = examine_dtype(model_dir, questions.dtype, kernels)
    examine_tensors(model_dir, questions.max_model_len)
    return f"{kind}, {attention}, {bits}, {dtype}"


def _untested(questions: Questions) -> str:
    """The model type, where only the start can tell whether it is served."""
    from loraplex.engine.model.loading import untested_type

    return "" if questions.model_dir is None else untested_type(Path(questions.model_dir))


if __name__ == "__main__":
    print(json.dumps(_answer(Questions(**json.loads(sys.argv[1])))))
