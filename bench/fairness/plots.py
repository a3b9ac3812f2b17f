"""One picture a workload. Needs matplotlib, which nothing but this uses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TypeVar

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot, rcParams

from bench.fairness.account import Run
from bench.fairness.baselines import FIRST_COME
from bench.fairness.report import OURS
from bench.fairness.workloads import Workload

Value = TypeVar("Value")
POINTS = 1400
"""Of all curves of a picture."""
# Okabe and Ito's colours, which the colour-blind can tell apart as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
POLICY_COLOURS = {
    FIRST_COME: "#999999",
    "round robin": "#e69f00",
    "least counter": "#56b4e9",
    "plain VTC": "#d55e00",
    "VTC predicting": "#009e73",
    "VTC oracle": "#cc79a7",
    OURS: "#0072b2",
}


def draw(workload: Workload, runs: dict[str, Run], bound: float, path: Path) -> None:
    """Left the gap over time under each policy, right what each tenant got under first-come and under ours."""
    rcParams.update({"svg.fonttype": "none", "svg.hashsalt": workload.name, "font.size": 9})
    rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    points = POINTS // (len(runs) + 2 * len(runs[OURS].weights))
    for name, run in runs.items():
        gaps = _thin(run.gaps, points)
        shown = [(at, 100 * gap / bound if gap else nan) for at, gap in gaps]
        wide = 2.0 if name == OURS else 1.1
        left.plot(*zip(*shown, strict=True), label=name, color=POLICY_COLOURS[name], linewidth=wide)
    left.axhline(100, color="black", linewidth=0.8, linestyle=":")
    left.annotate("bound", (0, 100), xytext=(2, 2), textcoords="offset points", fontsize=8)
    left.set(yscale="log", ylim=(0.1, 3000), xlabel="seconds", title="gap, % of the bound")
    left.yaxis.set_major_formatter("{x:g}")
    left.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")
    for number, tenant in enumerate(runs[OURS].weights):
        for name, style in ((OURS, "-"), (FIRST_COME, "--")):
            served = [(at, units[tenant] / 1000) for at, units in _thin(runs[name].served, points)]
            right.plot(
                *zip(*served, strict=True),
                style,
                color=COLOURS[number % len(COLOURS)],
                linewidth=1.2,
                label=tenant if name == OURS else None,
            )
    right.set(xlabel="seconds", title=f"thousand units served ({OURS}; dashed: {FIRST_COME})")
    right.legend(fontsize=7, frameon=False, loc="upper left")
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    # Two decimals are enough for what is drawn, and make the files a third as large.
    short = re.sub(r"(\d\.\d\d)\d+", r"\1", path.read_text("utf-8"))
    path.write_text("\n".join(line.rstrip() for line in short.splitlines()) + "\n", "utf-8")


def _thin(curve: Sequence[tuple[float, Value]], points: int) -> list[tuple[float, Value]]:
    stride = max(1, len(curve) // points)
    return [*curve[::stride], curve[-1]]
