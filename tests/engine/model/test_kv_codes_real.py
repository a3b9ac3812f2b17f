"""The real model: what keys and values in 8-bit codes do to its answers, and to those of an example adapter. The codes
themselves are compared with a reference in tests/kernels/attention/test_kv_codes.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.models.real_answers import logits, prompts_of

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_torch_thread")]


@pytest.mark.parametrize("name", ["base", "json", "sentiment"])
def test_answers_diverge_by_less_than_a_thousandth_and_a_half(name: str, real_model_dir: Path) -> None:
    """The pirate adapter's come to 0.0019 (docs/lab/README.md)."""
    prompts = prompts_of(real_model_dir)
    exact, codes = (
        logits(real_model_dir, prompts, quantise=False, names=(name,), kv_dtype=kv_dtype)[name]
        for kv_dtype in (torch.float32, torch.int8)
    )
    assert 1e-5 < float((exact.exp() * (exact - codes)).sum(-1).mean()) <= 0.0015
