"""Measures what a bound of the steps' times brings and costs in the simulator.

    PYTHONPATH=tests python -m bench.fairness.step_time [--only overload,long-prompts] [--jobs 2]

Runs the workloads with steps bounded by positions alone and by time, on a device on which attention to long prompts
takes time, and prints the largest gap by its bound, the throughput by that without a bound, and beside hogs the longest
step and the light tenant's wait for its first token.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from math import inf

from bench.fairness.account import Run, bound
from bench.fairness.device import LONG_PROMPTS as DEVICE
from bench.fairness.report import HOG_NAMES, table
from bench.fairness.simulation import simulate
from bench.fairness.workloads import LONG_PROMPTS, WORKLOADS
from loraplex.engine.scheduling.timing import step_bound
from loraplex.engine.scheduling.timing.step_bound import AUTO_STEPS

BY_NAME = {workload.name: workload for workload in (*WORKLOADS, LONG_PROMPTS)}


@dataclass(frozen=True, slots=True)
class Variant:
    """`bound`: seconds of a step; None: positions alone bound it. `shares`: those behind the first one in order get a
    part of the step; `turns`: the rows of a tenant that has many take turns."""

    name: str
    bound: float | None
    shares: bool = True
    turns: bool = True


VARIANTS = (
    Variant("positions", None),
    Variant("default", AUTO_STEPS * DEVICE.base),
    Variant("60 ms", 0.06),
    Variant("60 ms, no shares", 0.06, shares=False),
    Variant("60 ms, no turns", 0.06, turns=False),
)


def _run(name: str, variant: Variant) -> Run:
    if not variant.shares:
        step_bound.MOST_SHARING = 0  # this process runs nothing else
    if not variant.turns:
        step_bound.ROWS_SHARE = inf
    return simulate(BY_NAME[name], device=DEVICE, bound=variant.bound)


def _row(name: str, runs: list[Run]) -> list[str]:
    shares = [(run.max_gap or 0.0) / bound(DEVICE, BY_NAME[name]) for run in runs]
    speeds = [run.tokens_per_s / runs[0].tokens_per_s for run in runs[1:]]
    return [name, *(f"{share:.1%}" for share in shares), *(f"{speed:.3f}" for speed in speeds)]


def _hog_row(name: str, runs: list[Run]) -> list[str]:
    cells = [f"{1000 * run.longest_step_s:.0f} ms" for run in runs]
    for run in runs:
        waits = run.first_token_s["light"]
        cells.append(f"{statistics.median(waits):.2f} / {run.longest_wait_s['light']:.2f} s")
    return [name, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a bound of the steps' times brings.")
    parser.add_argument("--only", default="", help="these workloads alone, by name, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="simulations beside each other")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name] or list(BY_NAME)
    asked = [(name, variant) for name in names for variant in VARIANTS]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, spawn, max_tasks_per_child=1) as pool:
        runs = {}
        for (name, variant), run in zip(asked, pool.map(_run, *zip(*asked, strict=True)), strict=True):
            runs[name, variant] = run
            print(f"{name}: {variant.name}", file=sys.stderr, flush=True)
    by_name = {name: [runs[name, variant] for variant in VARIANTS] for name in names}
    told = [variant.name for variant in VARIANTS]
    head = ["workload", *(f"gap, {name}" for name in told), *(f"speed, {name}" for name in told[1:])]
    print(table(head, [_row(name, of) for name, of in by_name.items()]))
    head = ["beside", *(f"longest step, {name}" for name in told), *(f"first token, {name}" for name in told)]
    hogs = [(name, of) for name, of in by_name.items() if name in (*HOG_NAMES, LONG_PROMPTS.name)]
    print("\n" + table(head, [_hog_row(name, of) for name, of in hogs]))


if __name__ == "__main__":
    main()
