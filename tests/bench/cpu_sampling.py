"""Sampling on a CPU by the compiled kernel and by torch operations, in turns:
`PYTHONPATH=tests python -m bench.cpu_sampling [threads]`. Medians in milliseconds, for logits of 49,152 tokens."""

from __future__ import annotations

import os
import statistics
import sys
import time
from typing import Any

import torch

from loraplex.engine.execution.inputs import PlainInputs
from loraplex.engine.sampling.sampler import make_sampler
from loraplex.engine.types import SamplingParams
from loraplex.kernels.backend import make_kernels
from support.engine.sampling import EOS, row

VOCABULARY, TURNS = 49_152, 15
CPU = torch.device("cpu")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 50},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.05},
)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    print(f"threads {torch.get_num_threads()}, load {os.getloadavg()[0]:.1f}")
    samplers = {
        backend: make_sampler(make_kernels(backend, CPU), vocab_size=VOCABULARY, max_rows=64)
        for backend in ("numba", "torch")
    }
    for size in (1, 16, 32):
        logits = torch.randn(size, VOCABULARY, generator=torch.Generator().manual_seed(size)) * 3
        for options in OPTIONS:
            rows = [row(str(i), SamplingParams(9, seed=i, **options)) for i in range(size)]
            times: dict[str, list[float]] = {backend: [] for backend in samplers}
            for _ in range(TURNS):
                for backend, sampler in samplers.items():
                    batch = sampler.plan(rows, eos_ids=EOS, upload=PlainInputs(CPU))
                    given = logits.clone()
                    begin = time.perf_counter()
                    sampler.sample(given, batch, torch.zeros(size, dtype=torch.int64))
                    times[backend].append(time.perf_counter() - begin)
            shown = ", ".join(f"{name} {statistics.median(found) * 1e3:.2f}" for name, found in times.items())
            print(f"{size} rows, {options or 'temperature 1'}: {shown}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
