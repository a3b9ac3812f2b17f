"""What each rule of the scheduler brings: variants of it over all workloads and many seeds.

    PYTHONPATH=tests python -m bench.fairness.ablation --out FILE.json [--seeds 0-9] [--jobs 2]
        [--only overload,hog-64@40] [--variants "as it is,no places"]

Prints for each variant and workload the worst and the mean gap over the seeds, throughput by that of first-come in
vLLM's batch (the faster of with a block kept free for each running request and without), preemptions, and the most
steps that a light tenant's request waits for its place beside a hog; then a row for each variant. FILE.json keeps every
run that has ended: started again, it goes on with the others. Runs of another commit's engine are not told apart: one
file a commit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import inf
from pathlib import Path
from typing import Any

from bench.fairness.account import Run, bound
from bench.fairness.baselines import AS_NEEDED, FIRST_COME, play
from bench.fairness.device import Device
from bench.fairness.report import table
from bench.fairness.simulation import simulate
from bench.fairness.workloads import HOGS, WORKLOADS, Workload
from loraplex.engine.scheduling import block_needs, preempter, scheduler


def _as_it_is() -> None:
    pass


def _no_places() -> None:
    preempter.choose_victims = lambda *_: []


def _no_room_to_grow() -> None:
    block_needs._GROWTH = 0


def _no_order_of_prompts() -> None:
    admit = scheduler.Scheduler._admit

    def after_those_begun(self: scheduler.Scheduler, draft: Any, before: float = inf) -> None:
        if before == inf:
            admit(self, draft)

    scheduler.Scheduler._admit = after_those_begun


VARIANTS: dict[str, Callable[[], None]] = {
    "as it is": _as_it_is,
    "no places": _no_places,
    "no room to grow": _no_room_to_grow,
    "no order of prompts": _no_order_of_prompts,
}
"""Each changes the engine of its process, which runs nothing else."""
BY_NAME = {workload.name: workload for workload in WORKLOADS}
SHAPED = frozenset(workload.name for workload in WORKLOADS if workload.one_shape)
REFERENCE = "first-come, as needed"
HOG_NAMES = frozenset(workload.name for workload in HOGS)
Key = tuple[str, str, int]
"""Variant (or the reference), workload, seed."""


def _run(key: Key) -> tuple[Key, dict[str, Any]]:
    variant, name, seed = key
    workload, began = BY_NAME[name], time.process_time()
    if variant == REFERENCE:
        run = max((play(workload, FIRST_COME, rule, seed=seed) for rule in AS_NEEDED), key=_tokens_per_s)
    else:
        VARIANTS[variant]()
        run = simulate(workload, seed=seed)
    return key, _figures(run, workload) | {"cpu_s": round(time.process_time() - began, 2)}


def _tokens_per_s(run: Run) -> float:
    return run.tokens_per_s


def _figures(run: Run, workload: Workload) -> dict[str, Any]:
    told: dict[str, Any] = {
        "gap": (run.max_gap or 0.0) / bound(Device(), workload),
        "tokens_per_s": run.tokens_per_s,
        "preemptions": run.preemptions,
    }
    if workload.name in HOG_NAMES:
        steps, waits = run.steps_to_place["light"], run.first_token_s["light"]
        told |= {"steps_median": statistics.median(steps), "steps_max": max(steps)}
        told |= {"first_token_median_s": statistics.median(waits) if waits else None}
        told |= {"first_token_max_s": run.longest_wait_s["light"]}
    return told


def _read(path: Path) -> dict[Key, dict[str, Any]]:
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {(run["variant"], run["workload"], run["seed"]): run["figures"] for run in kept}


def _write(path: Path, runs: dict[Key, dict[str, Any]]) -> None:
    told = [
        {"variant": variant, "workload": workload, "seed": seed, "figures": figures}
        for (variant, workload, seed), figures in sorted(runs.items())
    ]
    beside = path.with_suffix(".new")
    beside.write_text("[\n" + ",\n".join(json.dumps(run) for run in told) + "\n]\n")
    beside.replace(path)


def _simulate(wanted: list[Key], runs: dict[Key, dict[str, Any]], jobs: int, path: Path) -> None:
    left = [key for key in wanted if key not in runs]
    spawn = multiprocessing.get_context("spawn")
    began = written = time.monotonic()
    with ProcessPoolExecutor(max_workers=jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        for count, done in enumerate(as_completed([pool.submit(_run, key) for key in left]), 1):
            key, figures = done.result()
            runs[key] = figures
            now = time.monotonic()
            if now > written + 5 or count == len(left):
                _write(path, runs)
                written = now
                rest = (now - began) / count * (len(left) - count)
                print(f"{count} of {len(left)}, {rest:.0f} s left", file=sys.stderr, flush=True)


def tables(
    runs: dict[Key, dict[str, Any]], variants: Iterable[str], names: list[str], seeds: list[int]
) -> str:
    """A row for each variant and workload, then one for each variant."""
    rows, summary = [], []
    for variant in variants:
        worst, ratios, preempted, steps = {}, {}, 0.0, {}
        for name in names:
            of = [runs[variant, name, seed] for seed in seeds]
            firsts = [runs[REFERENCE, name, seed] for seed in seeds]
            gaps = [run["gap"] for run in of]
            ratio = sum(run["tokens_per_s"] for run in of) / sum(run["tokens_per_s"] for run in firsts)
            preemptions = statistics.mean(run["preemptions"] for run in of)
            worst[name] = max(gaps)
            preempted += preemptions
            if name in SHAPED:
                ratios[name] = ratio
            if name in HOG_NAMES:
                steps[name] = max(run["steps_max"] for run in of)
            rows.append(
                [
                    variant,
                    name,
                    f"{max(gaps):.1%}",
                    f"{statistics.mean(gaps):.1%}",
                    f"{ratio:.3f}" if name in SHAPED else f"{ratio:.3f} *",
                    f"{preemptions:.0f}",
                    str(steps.get(name, "")),
                ]
            )
        at = max(worst, key=worst.__getitem__)
        least = min(ratios, key=ratios.__getitem__, default=None)
        most = max(steps, key=steps.__getitem__, default=None)
        summary.append(
            [
                variant,
                f"{worst[at]:.1%} ({at})",
                f"{statistics.mean(worst.values()):.1%}",
                "" if least is None else f"{ratios[least]:.3f} ({least})",
                f"{preempted:.0f}",
                "" if most is None else f"{steps[most]} ({most})",
            ]
        )
    head = [
        "variant",
        "workload",
        "worst gap",
        "mean gap",
        "throughput",
        "preemptions",
        "most steps to a place",
    ]
    shown = ["variant", "worst gap", "mean of the worst", "least throughput", *head[5:]]
    return f"{table(head, rows)}\n\n{table(shown, summary)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each rule of the scheduler brings.")
    parser.add_argument("--seeds", default="0-9", help="FIRST-LAST, or one")
    parser.add_argument("--jobs", type=int, default=1, help="simulations beside each other")
    parser.add_argument("--only", default="", help="these workloads alone, by name, separated by commas")
    parser.add_argument("--variants", default="", help="these variants alone, by name, separated by commas")
    parser.add_argument(
        "--out", type=Path, required=True, help="the runs, as JSON; those in it are not run again"
    )
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    names = [name for name in given.only.split(",") if name] or list(BY_NAME)
    variants = [name for name in given.variants.split(",") if name] or list(VARIANTS)
    if unknown := {*names} - BY_NAME.keys() | {*variants} - VARIANTS.keys():
        sys.exit(f"there is no workload or variant {', '.join(sorted(unknown))}")
    runs = _read(given.out)
    wanted = [(variant, name, seed) for seed in seeds for name in names for variant in (REFERENCE, *variants)]
    _simulate(wanted, runs, given.jobs, given.out)
    print(tables(runs, variants, names, seeds))
    spent = sum(runs[key]["cpu_s"] for key in wanted)
    print(f"\n{len(wanted)} runs, {spent:.0f} s of one processor; * requests of different shapes")


if __name__ == "__main__":
    main()
