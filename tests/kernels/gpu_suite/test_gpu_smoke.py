"""The smoke test of the kernels on a GPU runs interpreted, and says which kernel is wrong."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import fused, smoke
from loraplex.kernels.layers import triton_norm

CPU = torch.device("cpu")
KERNELS = [
    "LoRA, shrink and expand", "attention", "attention by torch", "residual and RMSNorm", "activation",
    "RoPE and KV write", "masks", "sampling", "log-sum-exp", "log probabilities",
    "LoRA, in its readers",
]  # fmt: skip

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def verdicts(said: list[str]) -> dict[str, str]:
    """By kernel, from the table at the end."""
    end = said[said.index("") + 1 :]
    return {line.split("  ")[-1]: line.split()[0] for line in end}


@pytest.mark.slow
def test_smoke_checks_every_kernel_and_finds_them_right():
    said: list[str] = []
    assert smoke.run(CPU, small=True, say=said.append)
    assert sorted(verdicts(said)) == sorted(KERNELS)
    assert set(verdicts(said).values()) == {"right"}


def test_tiny_smoke_is_two_cases_of_lora_and_two_of_attention():
    said: list[str] = []
    assert smoke.run(CPU, small=True, tiny=True, say=said.append)
    assert verdicts(said) == dict.fromkeys(KERNELS[:2], "right")
    assert said.index("") == 4


def test_smoke_names_a_wrong_kernel_and_one_that_cannot_run(monkeypatch):
    right = triton_norm.add_rms_norm
    monkeypatch.setattr(triton_norm, "add_rms_norm", lambda x, *rest: right(x * 1.01, *rest))

    def broken(*_args, **_options):
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(fused, "rope_case", broken)
    kept = ("residual and RMSNorm", "RoPE and KV write", "activation")
    every = smoke.checks
    monkeypatch.setattr(
        smoke, "checks", lambda *args, **options: (c for c in every(*args, **options) if c[0] in kept)
    )
    said: list[str] = []
    assert not smoke.run(CPU, small=True, say=said.append)
    assert verdicts(said) == dict(zip(kept, ("WRONG", "WRONG", "right"), strict=True))
    assert any("misaligned address" in line for line in said)


def test_smoke_needs_a_gpu_unless_small(capsys):
    if not torch.cuda.is_available():
        assert smoke.main([]) == 1
        assert "no CUDA device" in capsys.readouterr().err
