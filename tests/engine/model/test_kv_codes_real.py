"""The real model: what keys and values in 8-bit codes do to its answers, and to those of an example adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.cpu.quantised import logits, prompts_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]


def test_answers_diverge_by_less_than_a_thousandth_and_a_half(real_model_dir: Path) -> None:
    prompts = [prompt[:80] for prompt in prompts_of(real_model_dir)]
    exact, codes = (
        logits(real_model_dir, prompts, quantise=False, names=("base", "json"), kv_dtype=kv_dtype)
        for kv_dtype in (torch.float32, torch.int8)
    )
    for name, expected in exact.items():
        divergence = float((expected.exp() * (expected - codes[name])).sum(-1).mean())
        assert 1e-5 < divergence <= 0.0015, name
