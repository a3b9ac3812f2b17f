"""All policies on the same arrivals."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf

from bench.fairness.account import Run
from bench.fairness.baselines import AS_NEEDED, FIRST_COME, ORDERS, RULES, play
from bench.fairness.device import Device
from bench.fairness.report import OURS, Runs
from bench.fairness.simulation import simulate
from bench.fairness.workloads import WORKLOADS, Workload

Asked = tuple[str, str, str, Device, int]
"""Workload, policy, the rule of its batch, ..."""


def compare(workloads: Sequence[Workload], device: Device, seed: int, jobs: int) -> Runs:
    """Every workload under every policy, `jobs` at a time. Each is shown in the batch with its smallest gap;
    first-come, the reference for throughput, in the faster of vLLM's two."""
    asked: list[Asked] = [
        (workload.name, policy, rule, device, seed)
        for workload in workloads
        for policy, rules in (*((order, RULES) for order in ORDERS), (OURS, ("",)))
        for rule in (AS_NEEDED if policy == FIRST_COME else rules)
    ]
    runs: Runs = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=spawn) as pool:
        for (name, policy, rule, *_), run in zip(asked, pool.map(_simulate, asked), strict=True):
            print(f"{name}: {policy} {rule}", file=sys.stderr, flush=True)
            best = runs.setdefault(name, {}).get(policy)
            if best is None or _weakness(policy, run) < _weakness(policy, best):
                runs[name][policy] = run
    return runs


def _weakness(policy: str, run: Run) -> float:
    if policy == FIRST_COME:
        return -run.tokens_per_s
    return inf if run.max_gap is None else run.max_gap


def _simulate(asked: Asked) -> Run:
    name, policy, rule, device, seed = asked
    (workload,) = (workload for workload in WORKLOADS if workload.name == name)
    if policy == OURS:
        return simulate(workload, device=device, seed=seed)
    return play(workload, policy, rule, device=device, seed=seed)
