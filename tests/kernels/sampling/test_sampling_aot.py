"""The Triton kernels of sampling, compiled for GPUs that are not there, as they are launched for a large vocabulary.

After a change that is meant to take more: RECORD_AOT=1 python -m pytest tests/kernels/sampling/test_sampling_aot.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loraplex.kernels.sampling import triton_edits, triton_logsumexp, triton_programs, triton_sampling
from loraplex.kernels.sampling.triton_sampling import TritonSampling
from loraplex.kernels.sampling.types import Biases, History, Option, Options, SampleRows, TokenMasks
from support.kernels.triton_aot import ARCHS, Recorder, Variant, check

RECORD = Path(__file__).parents[1] / "aot" / "sampling.json"
TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
DRAW = ("peaks", "weigh", "gather", "select", "sum_kept", "pick")


def variant(name: str, kernel: str, arguments: dict[str, Any]) -> Variant:
    warps = arguments.pop("num_warps")
    constants = {key: value for key, value in arguments.items() if key.isupper()}
    rest = {key: value for key, value in arguments.items() if key not in constants}
    return Variant(
        name,
        kernel,
        {
            key: f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"
            for key, value in rest.items()
        },
        constants,
        num_warps=warps,
        # What comes in a step's one copy, and rows of scratch memory, may lie anywhere.
        unaligned=tuple(key for key in rest if key.endswith("_ptr") and key not in ("logits_ptr", "x_ptr")),
        multiples_of_16=tuple(
            key for key, value in rest.items() if isinstance(value, int) and value % 16 == 0
        ),
    )


def launched(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """The launches of a step that uses everything, of one in which all are greedy, and of log probabilities."""
    found: dict[str, Variant] = {}
    with monkeypatch.context() as patch:

        def record(module: Any, kernel_module: Any, name: str, suffix: str) -> None:
            def keep(arguments: dict[str, Any]) -> None:
                full = f"{name}, {vocab_size}{suffix}"
                found[full] = variant(full, f"{kernel_module.__name__}:{name}", arguments)

            patch.setattr(module, name, Recorder(getattr(kernel_module, name), keep))

        rows, cpu = 2, torch.device("cpu")
        logits, last = torch.zeros(rows, vocab_size), torch.zeros(rows, dtype=torch.int64)
        ints, floats = torch.zeros(rows + 1, dtype=torch.int64), torch.zeros(rows)
        host = np.full((rows, len(Option)), 0.5)
        options = Options(host, torch.from_numpy(host))
        sampling = TritonSampling(rows, vocab_size, cpu)
        for name in DRAW:
            record(triton_sampling, triton_programs, name, "")
        for name in ("penalise", "add_bias"):
            record(triton_sampling, triton_edits, name, "")
        history, biases = History(ints, ints, last), Biases(ints, ints, floats)
        sampling.draw(logits, SampleRows(rows, options, history, biases), last)
        record(triton_sampling, triton_programs, "pick", ", greedy")
        record(triton_sampling, triton_programs, "peaks", ", masked")
        bits = torch.zeros(rows, -(-vocab_size // 32), dtype=torch.int32)
        sampling.draw(logits, SampleRows(rows), last, TokenMasks(last, last, bits))
        for name in ("tile_sums", "join_sums"):
            record(triton_logsumexp, triton_logsumexp, name, "")
        triton_logsumexp.log_sum_exp(logits)
    return list(found.values())


@pytest.mark.parametrize(
    "archs", [pytest.param((90,), marks=pytest.mark.slow), pytest.param(ARCHS, marks=pytest.mark.soak)]
)
def test_all_compile_and_take_no_more_than_recorded(
    archs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = launched(128256, monkeypatch)
    report = check(variants, RECORD, compiled=[replace(variant, archs=archs) for variant in variants])
    for name, by_arch in report.items():
        for arch, usage in by_arch.items():
            assert usage.spill_bytes == 0, f"{name} on {arch}"
            # Whole tiles are read 16 bytes at a time.
            kernel, *_, last = name.split(", ")
            tiles = (
                kernel in ("peaks", "weigh", "gather", "sum_kept", "pick", "tile_sums") and last != "greedy"
            )
            assert (usage.wide_loads > 0) == tiles, f"{name} on {arch}"
