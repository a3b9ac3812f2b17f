"""All policies on the same arrivals."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.fairness.device import Device
from bench.fairness.policies import FirstCome, LeastCounter, PlainVtc, RoundRobin
from bench.fairness.report import FIRST_COME, OURS, Runs
from bench.fairness.simulation import Run, simulate
from bench.fairness.workloads import Workload
from loraplex.engine.fairness import WaitingQueue

POLICIES: dict[str, Callable[[], WaitingQueue] | None] = {
    FIRST_COME: FirstCome,
    "round robin": RoundRobin,
    "least counter": LeastCounter,
    "plain VTC": PlainVtc,
    OURS: None,
}


def compare(workloads: Sequence[Workload], device: Device, seed: int, jobs: int) -> Runs:
    """Every workload under every policy, so many at a time."""
    asked = [(workload, name, device, seed) for workload in workloads for name in POLICIES]
    runs: Runs = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=spawn) as pool:
        for (workload, name, *_), run in zip(asked, pool.map(_simulate, asked), strict=True):
            runs.setdefault(workload.name, {})[name] = run
            print(f"{workload.name}: {name}", file=sys.stderr, flush=True)
    return runs


def _simulate(asked: tuple[Workload, str, Device, int]) -> Run:
    workload, name, device, seed = asked
    return simulate(workload, POLICIES[name], device=device, seed=seed)
