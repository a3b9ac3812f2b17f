"""Where a step's time goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_PARTS = (
    ("LoRA, A side", ("shrink",)),
    ("LoRA, B side", ("expand",)),
    ("attention", ("attention_program", "merge_program")),
    ("norms", ("rms_norm",)),
    ("RoPE and KV write", ("rope",)),
    ("activation", ("gated_program",)),
    ("linears", ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitk", "xmma")),
)
"""By what a kernel's name holds."""


def by_part(run: Callable[[], object], labels: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each part of one run: launches, and milliseconds that add up to the run's, less its gaps (`shares`).
    Needs a GPU whose kernels the profiler sees."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = shares(
        (part_of(event.name), event.time_range.start / 1e3, event.time_range.end / 1e3)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    )
    if not found:
        raise RuntimeError("the profiler saw no kernel")
    total = sum(map(sum, found.values()))
    rows = [
        {**labels, "part": part, "launches": len(times), "ms": sum(times), "share": sum(times) / total}
        for part, times in sorted(found.items(), key=lambda item: -sum(item[1]))
    ]
    launches = sum(len(times) for times in found.values())
    return [*rows, {**labels, "part": "all", "launches": launches, "ms": total, "share": 1.0}]


def shares(launches: Iterable[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Split the union of the intervals (part, begin, end) by part, a number for each launch. A time in which several
    run counts for the first of them: a kernel that is launched early does nothing but wait then."""
    found: dict[str, list[float]] = {}
    latest = float("-inf")
    for part, begin, end in sorted(launches, key=lambda launch: launch[1:]):
        found.setdefault(part, []).append(max(0.0, end - max(begin, latest)))
        latest = max(latest, end)
    return found


def part_of(name: str) -> str:
    """The part of a step that a kernel of this name computes."""
    lower = name.lower()
    return next(
        (part for part, words in _PARTS if any(word in lower for word in words)), f"other: {name[:40]}"
    )
