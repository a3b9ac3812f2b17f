"""How long things take: on a GPU by its own events; elsewhere by the clock, which tells that a case runs, no more."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from bench.gpu.timing import Ceilings


class Stopwatch:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    def once_ms(self, run: Callable[[], object], times: int = 1) -> float:
        """Milliseconds of one run, of `times` queued one behind the other."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / times
        begun = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begun) * 1e3 / times

    def interleaved_ms(
        self, runs: Sequence[Callable[[], object]], *, rounds: int = 15, times: int = 3
    ) -> list[float]:
        """The median of each, taken in turns, so that what changes on the machine meanwhile changes all of them."""
        if not self._cuda:
            rounds, times = 1, 1
        for run in runs:
            run()
        taken = [[self.once_ms(run, times) for run in runs] for _ in range(rounds)]
        return [statistics.median(column) for column in zip(*taken, strict=True)]

    def median_ms(self, run: Callable[[], object], *, rounds: int = 15, times: int = 1) -> float:
        return self.interleaved_ms([run], rounds=rounds, times=times)[0]

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)


def measure_ceilings(watch: Stopwatch, *, num_bytes: int = 4 << 30, side: int = 8192) -> Ceilings:
    """What a copy within the device moves, read and written, and what its libraries' matrix product of random numbers
    computes."""
    if watch.device.type != "cuda":
        num_bytes, side = 1 << 20, 64
    source = torch.empty(num_bytes, dtype=torch.uint8, device=watch.device).random_()
    target = torch.empty_like(source)
    copy_ms = watch.median_ms(lambda: target.copy_(source), rounds=7)
    a, b = (torch.randn(side, side, device=watch.device, dtype=torch.bfloat16) for _ in range(2))
    product_ms = watch.median_ms(lambda: torch.mm(a, b), rounds=7)
    return Ceilings(2 * num_bytes / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)


def launch_us(watch: Stopwatch, count: int = 500) -> float:
    """What one launch more costs in a recording."""
    x = torch.zeros(32, device=watch.device)

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    run: Callable[[], object] = many
    if watch.device.type == "cuda":
        many()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        run = graph.replay
    return watch.median_ms(run, rounds=7) * 1e3 / count
