"""The tables, and the aims that they are held against."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.hogs.tenants import Seen

FIRST_TOKEN, GAP, P99 = 6.0, 5.0, 10.0
"""Times alone: the most that the median first token, the median of an answer's longest gap, and the p99 of both are to
take beside a mix. All of them are over the median alone."""


@dataclass(frozen=True)
class Spread:
    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """p99 is the value at the nearest rank: of fewer than 100, the largest."""
        ranked = sorted(values) or [math.nan]
        return cls(statistics.median(ranked), ranked[math.ceil(0.99 * len(ranked)) - 1], ranked[-1])


def missed(alone: Seen, beside: Seen) -> list[str]:
    """The aims that it misses."""
    found = []
    for what, own, other, most in (
        ("first token", alone.waits, beside.waits, FIRST_TOKEN),
        ("gap", alone.gaps, beside.gaps, GAP),
    ):
        base, spread = Spread.of(own).median, Spread.of(other)
        # An empty list is a miss too: nan compares as false.
        if not spread.median <= most * base:
            found.append(f"{what}, median")
        if not spread.p99 <= P99 * base:
            found.append(f"{what}, p99")
    return found


def _cells(alone: Sequence[float], values: Sequence[float]) -> list[str]:
    base, spread = Spread.of(alone).median, Spread.of(values)
    return [
        f"{spread.median:.3f} s",
        f"{spread.median / base:.1f}",
        f"{spread.p99:.3f} s",
        f"{spread.p99 / base:.1f}",
        f"{spread.most:.3f} s",
    ]


def hog_table(seen: Mapping[str, Mapping[str, Seen]], titles: Mapping[str, str]) -> str:
    """`seen` by setting, then "alone" and the mixes' names. Settings of one mix are beside each other."""
    head = ["beside", "setting", "first token, median", "× alone", "p99", "×", "longest"]
    head += ["longest gap, median", "× alone", "p99", "×", "longest", "requests", "missed"]
    lines = [head, ["---"] * len(head)]
    names = list(dict.fromkeys(name for of in seen.values() for name in of))
    for name in sorted(names, key=lambda name: name != "alone"):
        for setting, of in seen.items():
            if name not in of:
                continue
            alone, other = of["alone"], of[name]
            row = [titles.get(name, name), setting, *_cells(alone.waits, other.waits)]
            row += [*_cells(alone.gaps, other.gaps), str(len(other.waits))]
            lines.append([*row, "" if name == "alone" else ", ".join(missed(alone, other)) or "none"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Rate:
    """A figure of throughput and its aim, as a ratio of the last setting to the first."""

    title: str
    unit: str
    """More is better of "tokens/s", and less of "s"."""
    aim: float

    def is_met(self, ratio: float) -> bool:
        return ratio <= self.aim if self.unit == "s" else ratio >= self.aim


def rate_table(rates: Mapping[str, Rate], measured: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """`measured` by setting and name of the rate: a figure of each round."""
    head = ["work", "unit", *measured, "last / first", "aim", "met"]
    lines = [head, ["---"] * len(head)]
    for name, rate in rates.items():
        of = [figures[name] for figures in measured.values() if name in figures]
        if not of:
            continue
        cells = [
            f"{statistics.median(figures):.4g} ({', '.join(f'{f:.4g}' for f in figures)})" for figures in of
        ]
        ratio = last_to_first(of)
        aim = f"{'≤' if rate.unit == 's' else '≥'} {rate.aim}"
        met = "yes" if rate.is_met(ratio) else "**no**"
        lines.append([rate.title, rate.unit, *cells, f"{ratio:.3f}", aim, met])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def last_to_first(of: Sequence[Sequence[float]]) -> float:
    """Median of the last setting's figures over that of the first's."""
    return statistics.median(of[-1]) / statistics.median(of[0])
