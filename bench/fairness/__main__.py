"""The fairness of the scheduler beside other policies, on the same arrivals.

    PYTHONPATH=tests python -m bench.fairness [--out docs [--json FILE]] [--only overload,weights] [--seed 0] [--jobs 1]

Runs every workload under every policy (a few minutes in all) and prints the tables. With --out it also writes the
three plots to OUT/fairness/ and the tables into OUT/fairness.md, between the marks that stand there; that needs
matplotlib (`pip install --constraint constraints.txt matplotlib`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench.fairness.account import bound
from bench.fairness.comparison import compare
from bench.fairness.device import Device
from bench.fairness.report import PICTURES, Runs, figures, tables
from bench.fairness.workloads import WORKLOADS

BEGIN, END = "<!-- written by bench.fairness -->\n", "<!-- until here -->\n"


def _commit() -> str:
    """The last that changed the engine."""
    command = ["git", "log", "-1", "--format=%h", "--", "server", "adapters"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _write(out: Path, json_file: Path | None, runs: Runs, device: Device, seed: int) -> None:
    from bench.fairness.plots import draw  # needs matplotlib

    (out / "fairness").mkdir(parents=True, exist_ok=True)
    shown = [workload for workload in WORKLOADS if workload.name in runs]
    for workload in (workload for workload in shown if workload.name in PICTURES):
        draw(workload, runs[workload.name], bound(device, workload), out / f"fairness/{workload.name}.svg")
    told = figures(shown, runs, device)
    head = {"commit": _commit(), "seed": seed, "device": asdict(device)}
    if json_file is not None:
        json_file.write_text(json.dumps(head | {"results": told}, indent=1) + "\n")
    page = out / "fairness.md"
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"The engine of commit {head['commit']}, seed {seed}.\n\n{tables(told, runs)}\n"
    page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The scheduler's fairness beside other policies.")
    parser.add_argument("--out", type=Path, help="the documentation's folder, to write into")
    parser.add_argument("--json", type=Path, help="with --out: a file for all figures")
    parser.add_argument("--only", default="", help="these workloads alone, by name, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="simulations beside each other")
    arguments = parser.parse_args()
    only = set(filter(None, arguments.only.split(",")))
    if unknown := only - {workload.name for workload in WORKLOADS}:
        sys.exit(f"there is no workload {', '.join(sorted(unknown))}")
    if only and arguments.out:
        sys.exit("the documentation shows all workloads: --only does not go with --out")
    device = Device()
    chosen = [workload for workload in WORKLOADS if workload.name in only or not only]
    runs = compare(chosen, device, arguments.seed, arguments.jobs)
    if arguments.out:
        _write(arguments.out, arguments.json, runs, device, arguments.seed)
    print(tables(figures(chosen, runs, device), runs))


if __name__ == "__main__":
    main()
