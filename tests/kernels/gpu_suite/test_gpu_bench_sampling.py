"""The GPU suite's cases for sampling run anywhere, and notice what is wrong."""

from __future__ import annotations

import pytest
import torch

from bench.gpu import sampling
from bench.gpu.timing import Ceilings
from loraplex.kernels.sampling.triton_sampling import TritonSampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("case", sampling.small_cases(), ids=lambda case: case.name)
def test_small_cases_are_right(case):
    result = sampling.run_case(case, DEVICE, Ceilings())
    assert result["ok"], result
    assert result["floor_ms"] > 0
    assert (result["graph_ms"] is None) == (DEVICE.type == "cpu")


def test_log_sum_exp_is_right():
    assert sampling.log_sum_exp_case(2, 4100, DEVICE)["ok"]


def test_a_wrong_token_is_noticed(monkeypatch):
    true = TritonSampling.draw

    def wrong(self, logits, rows, last_tokens):
        tokens, ok = true(self, logits, rows, last_tokens)
        return (tokens + 1) % logits.shape[1], ok

    monkeypatch.setattr(TritonSampling, "draw", wrong)
    result = sampling.run_case(sampling.small_cases()[2], DEVICE)
    assert not result["ok"]
    assert result["wrong"] == 2


def test_full_cases_have_names_of_their_own():
    cases = sampling.full_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert sampling.LLAMA in {case.vocab_size for case in cases}
