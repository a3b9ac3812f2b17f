"""Draws the dashboards from the data of a real server under load: the same queries, at a real Prometheus, not Grafana.

    make dashboards       # needs Debian's packages prometheus and redis-server, and matplotlib

A server of a tiny model runs under load for about two minutes. Meanwhile a release changes, Redis is away for a
moment and the engine dies once, so that there is something to see.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from support.servers.busy_server import CHOSEN, BusyServer, busy_server
from support.servers.prometheus import Prometheus
from tools.dashboards.__main__ import FOLDER
from tools.dashboards.queries import ShownPanel, choices, fill_in, panels, read_board

IMAGES = Path(__file__).resolve().parents[2] / "docs/images"
MAX_BYTES = 200_000
COLUMNS, PANEL_W, PANEL_H = 3, 4.2, 2.5
"""Panels in a row, and inches of each."""
BACKGROUND, FACE, TEXT = "#111217", "#181b1f", "#ccccdc"
LINES = (
    "#73bf69",
    "#f2cc0c",
    "#5794f2",
    "#ff9830",
    "#f2495c",
    "#b877d9",
    "#8ab8ff",
    "#96d98d",
    "#ffb357",
    "#ca95e5",
)
RATE, SPAN, STEP = "15s", "5m", 1.0
QUIET_S = 30.0
"""Load before, between and after the troubles, so that each can be told apart."""

Points = Sequence[tuple[float, float]]


def number(value: float, unit: str) -> str:
    """As the panel's unit shows it."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 1024:.3g} KiB" if abs(value) < 1 << 20 else f"{value / (1 << 20):.3g} MiB"
    if unit == "none":
        return f"{value:.0f}"
    return f"{value:.3g}" + {"reqps": " req/s", "ops": " /s"}.get(unit, "")


def named(legend: str, metric: Mapping[str, str]) -> str:
    for label, value in metric.items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    return legend


def answers(
    prometheus: Prometheus, panel: ShownPanel, values: Mapping[str, str], began: float, until: float
) -> dict[str, Points]:
    """The lines of a panel by their legend; times in seconds from the left."""
    found: dict[str, Points] = {}
    for expression, legend in panel.targets:
        filled = fill_in(expression, values, rate_interval=RATE, span=SPAN)
        for series in prometheus.query_range(filled, began, until, STEP):
            points = [(float(at) - began, float(value)) for at, value in series["values"]]
            found[named(legend, series["metric"])] = [point for point in points if math.isfinite(point[1])]
    return {name: points for name, points in sorted(found.items()) if points}


def draw_panel(axes: Axes, panel: ShownPanel, lines: Mapping[str, Points], seconds: float) -> None:
    defaults = panel.plain["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    axes.set_title(panel.title, loc="left", fontsize=9, color=TEXT, fontweight="bold")
    if panel.plain["type"] == "stat":
        axes.set_axis_off()
        shown = list(lines.items())[:6]
        for row, (name, points) in enumerate(shown):
            y = 1 - (row + 0.5) / max(3, len(shown))
            axes.text(0.02, y, number(points[-1][1], unit), color=LINES[0], fontsize=13, va="center")
            axes.text(0.35, y, name, color=TEXT, fontsize=9, va="center")
        return
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    if stacked:
        times = sorted({at for points in lines.values() for at, _ in points})
        heights = [[dict(points).get(at, 0.0) for at in times] for points in lines.values()]
        axes.stackplot(times, *heights, labels=list(lines), colors=LINES, alpha=0.7)
    else:
        for color, (name, points) in zip(LINES * 4, lines.items(), strict=False):
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1.1, label=name)
    axes.set_xlim(0, seconds)
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, unit)))
    axes.tick_params(colors=TEXT, labelsize=7)
    axes.grid(color="#2c3235", linewidth=0.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(
        fontsize=6, loc="upper left", ncols=2, labelcolor=TEXT, facecolor=FACE, edgecolor=FACE, framealpha=0.6
    )


def draw(board: Mapping[str, Any], busy: BusyServer, until: float, path: Path) -> None:
    values = choices(board, CHOSEN, busy.prometheus.label_values)
    shown = list(panels(board))
    rows = math.ceil(len(shown) / COLUMNS)
    figure = Figure(
        figsize=(COLUMNS * PANEL_W, rows * PANEL_H + 0.5), dpi=80, facecolor=BACKGROUND, layout="constrained"
    )
    chosen = ", ".join(f"{name} {value}" for name, value in values.items() if name in CHOSEN)
    figure.suptitle(
        f"{board['title']}{': ' if chosen else ''}{chosen}", color=TEXT, fontsize=12, ha="left", x=0.01
    )
    grid = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for axes, panel in zip(grid, shown, strict=False):
        axes.set_facecolor(FACE)
        draw_panel(
            axes, panel, answers(busy.prometheus, panel, values, busy.began, until), until - busy.began
        )
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_axis_off()
    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    assert path.stat().st_size <= MAX_BYTES, f"{path.name}: {path.stat().st_size} bytes"


def main() -> None:
    mpl.use("agg")
    with tempfile.TemporaryDirectory() as scratch, busy_server(Path(scratch)) as busy:
        time.sleep(QUIET_S)
        busy.get_into_trouble()
        time.sleep(QUIET_S)
        until = time.time()
        for path in sorted(FOLDER.glob("*.json")):
            draw(
                read_board(path), busy, until, IMAGES / f"dashboard-{path.stem.removeprefix('loraplex-')}.png"
            )


if __name__ == "__main__":
    main()
