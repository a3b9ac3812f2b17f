"""Times of kernels on a GPU, without the host: many runs recorded in one CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """What the device does at best, measured: bytes/s of a copy (read and written), flop/s of a bf16 GEMM. The
    defaults are an H200's."""

    bytes_per_s: float = 4.3e12
    flops_per_s: float = 790e12

    def floor_ms(self, num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s) * 1e3


def median_ms(
    run: Callable[[], object], device: torch.device, *, runs: int = 20, rounds: int = 7
) -> float | None:
    """Milliseconds of one run, the median of `rounds` replays of a graph of `runs`. None where there is no GPU: what
    the interpreter takes says nothing."""
    if device.type != "cuda":
        return None
    for _ in range(3):  # compiles, and fills the allocator
        run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / runs)
    return statistics.median(times)


def eager_ms(run: Callable[[], object], device: torch.device, *, runs: int = 5) -> float | None:
    """The same for what no graph can hold."""
    if device.type != "cuda":
        return None
    run()
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number; infinity where something is not finite."""
    if not got.numel():
        return 0.0
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
