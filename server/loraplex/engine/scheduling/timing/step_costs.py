"""Relative costs of decoding steps by their number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

MOST_ROWS = 64
"""Rows of the largest step that a cost is known of."""
FEW_ROWS = (1, 4, 8, 2, 5, 3, 9)
MANY_ROWS = (16, 32, 17, 64)
"""Numbers of rows that are worth measuring, the most important first. Kernels compute rows in tiles of 4, 8 or 16: the
sizes on both sides of an edge show whether a tile that is begun costs as much as a full one."""
_LEAST_PER_ROW = 0.01
"""No row is cheaper than this share of a step of one row: reading its token and sampling cost that much on the fastest
device."""


class NotMeasured(Exception):
    """The times are of too few sizes, or no times."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The cost of a decoding step by its rows, as a multiple of a step of one row. It never falls with the number of
    rows. `by_rows[r - 1]` is that of r rows, for 1 … MOST_ROWS."""

    by_rows: tuple[float, ...]

    @classmethod
    def from_seconds(cls, seconds: Mapping[int, float]) -> StepCosts:
        """The costs of measured steps. `seconds`: the least time of a step by its number of rows. Between two measured
        sizes the costs are on a line; above the largest, on the line through one row and that size.

        What else runs on the machine only adds to a time. So a size takes no more than any larger one did, and no more
        than as many steps of one row. Raises NotMeasured where one row or all larger sizes are missing, or a time is no
        positive number.
        """
        if len(seconds) < 2 or 1 not in seconds:
            measured = sorted(seconds) or "no"
            raise NotMeasured(f"steps of {measured} rows were measured: one row and a larger size are needed")
        least = least_times(seconds)
        costs = [_bounded(rows, on_line(least, rows) / least[1]) for rows in range(1, MOST_ROWS + 1)]
        return cls(tuple(costs))

    def cost(self, rows: int) -> float:
        """The cost of a step of `rows` rows, 1 or more. Above MOST_ROWS it grows as to there on average."""
        if rows <= MOST_ROWS:
            return self.by_rows[rows - 1]
        return 1.0 + (self.by_rows[-1] - 1.0) / (MOST_ROWS - 1) * (rows - 1)


def least_times(seconds: Mapping[int, float]) -> dict[int, float]:
    """Times by size, ascending, where none is above that of a larger size. Raises NotMeasured where one is no positive
    number."""
    if not all(isfinite(took) and took > 0 for took in seconds.values()):
        raise NotMeasured("a step took no measurable time")
    least = dict(sorted(seconds.items()))
    for size, larger in reversed(list(pairwise(least))):
        least[size] = min(least[size], least[larger])
    return least


def on_line(least: Mapping[int, float], rows: int) -> float:
    """Seconds of a step of `rows` rows, by those of sizes in ascending order from 1 on: on the line between its
    neighbours; above the largest, on the line through one row and that size."""
    if rows in least:
        return least[rows]
    sizes = list(least)
    above = next((size for size in sizes if size > rows), sizes[-1])
    below = 1 if rows > above else max(size for size in sizes if size < rows)
    return least[below] + (least[above] - least[below]) / (above - below) * (rows - below)


def _bounded(rows: int, cost: float) -> float:
    return min(max(cost, 1.0 + _LEAST_PER_ROW * (rows - 1)), float(rows))
