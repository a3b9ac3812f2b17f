"""What doctor says of a GPU's kernels."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine import kernel_report
from loraplex.kernels.backend import make_kernels


@pytest.mark.parametrize(
    ("capability", "recorded"),
    [
        (
            (9, 0),
            "decoding steps and those with prompt chunks of up to 640 rows for a model of 8 billion weights",
        ),
        ((8, 9), "decoding steps"),
    ],
)
def test_a_gpu_is_named_with_what_it_records(capability, recorded, monkeypatch) -> None:
    monkeypatch.setattr(kernel_report, "set_threads", lambda _: "")
    monkeypatch.setattr(
        kernel_report, "choose_kernels", lambda *_: make_kernels("triton", torch.device("cuda"))
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Card")
    major, minor = capability
    want = f"triton on Card, compute capability {major}.{minor}; {recorded} are recorded"
    assert kernel_report.describe_kernels("auto", "cuda", 0) == want
