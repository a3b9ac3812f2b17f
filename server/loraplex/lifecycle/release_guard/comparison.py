"""One metric of two arms: what is shown of its numbers, and the evidence that the candidate's are larger.

A rate's numbers are used as they are. Of any other metric, a number becomes its rank within the group, the candidate's
after a division by 1 + margin: a test of stochastic order, whatever the distribution. Ranks below a quarter are 0 and
those above three quarters 1, which finds more where users are few.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec

from loraplex.lifecycle.release_guard.evidence import Evidence
from loraplex.lifecycle.release_guard.rules import METRICS, MetricName

MAX_RECENT = 64
"""Numbers of an arm that are kept, to show medians of."""
OVERDUE = 1e300
"""The length of an answer that has not ended: longer than any. JSON has no infinity."""
Unit = Literal["user", "key", "request"]
_MAX_LOG = 700.0
"""Keeps an e-value finite."""


class Reading(msgspec.Struct, frozen=True):
    """A metric as it stands."""

    metric: MetricName
    e_value: float
    """The metric's own evidence."""
    share: float
    """Its weight in the mean over the metrics."""
    margin: float
    candidate: float | None
    """The share of a rate, else the median of the last numbers: infinite where most answers have not ended, None
    without a number."""
    control: float | None
    bound: float | None
    """The largest value of the candidate that is not worse."""
    num_candidate: int
    """Units that were counted."""
    num_control: int
    needs: int
    """Units of both arms that are missing until the metric could have shown what the guard looks for."""
    unit: Unit

    @property
    def shown(self) -> str:
        """The reading in one line."""
        metric = METRICS[self.metric]
        candidate, control, bound = map(metric.shown, (self.candidate, self.control, self.bound))
        counted = f"{self.num_candidate} {self.unit}{'' if self.num_candidate == 1 else 's'}"
        said = f"{self.metric}: {candidate} {metric.of} ({counted})"
        return f"{said}; the control's {control} allows {bound}"


class Tally(msgspec.Struct, forbid_unknown_fields=True):
    """The numbers of an arm, to be shown."""

    count: int = 0
    total: float = 0.0
    recent: list[float] = []

    def add(self, number: float) -> None:
        self.count += 1
        self.total += min(number, 1.0)  # of a rate; of others it is not asked for
        self.recent.append(number)
        del self.recent[:-MAX_RECENT]

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def median(self) -> float | None:
        if not self.recent:
            return None
        middle = sorted(self.recent)[len(self.recent) // 2]
        return math.inf if middle >= OVERDUE / 100 else middle


class Comparison(msgspec.Struct, forbid_unknown_fields=True):
    """A metric, its evidence, and the numbers that came so far."""

    metric: MetricName
    evidence: Evidence
    control: Tally = msgspec.field(default_factory=Tally)
    candidate: Tally = msgspec.field(default_factory=Tally)

    @classmethod
    def start(cls, metric: MetricName, margin: float) -> Comparison:
        known = METRICS[metric]
        # The margin of a rank is in the division already.
        return cls(metric, Evidence(margin, known.prior) if known.is_rate else Evidence(0.0, None))

    def count(self, number: float, *, is_candidate: bool) -> None:
        """Take one unit's number, to be shown."""
        (self.candidate if is_candidate else self.control).add(number)

    def compare(self, group: Sequence[tuple[float, bool]], margin: float) -> None:
        """Add a group's numbers to the evidence; the second of a pair says whether it is the candidate's. Their order
        must not depend on the arms."""
        if not METRICS[self.metric].is_rate:
            group = _ranks([(number / (1 + margin) if own else number, own) for number, own in group])
        self.evidence.add(group)

    @property
    def e_value(self) -> float:
        return math.exp(min(self.evidence.log_e_value, _MAX_LOG))

    def reading(self, margin: float, share: float, needs: int, unit: Unit) -> Reading:
        """The metric as it stands. `share`: its weight in the mean."""
        if METRICS[self.metric].is_rate:
            control, candidate = self.control.mean, self.candidate.mean
            bound = None if control is None else control + margin
        else:
            control, candidate = self.control.median, self.candidate.median
            bound = None if control is None else control * (1 + margin)
        return Reading(
            self.metric,
            self.e_value,
            share,
            margin,
            candidate,
            control,
            bound,
            self.candidate.count,
            self.control.count,
            needs,
            unit,
        )


def _ranks(group: Sequence[tuple[float, bool]]) -> list[tuple[float, bool]]:
    """Each number's rank in the group from 0 to 1, equal ones at their middle, twice as far from 1/2 and cut off."""
    ordered = sorted(number for number, _ in group)
    found = []
    for number, is_candidate in group:
        rank = (bisect_left(ordered, number) + bisect_right(ordered, number)) / (2 * len(ordered))
        found.append((min(1.0, max(0.0, 2 * rank - 0.5)), is_candidate))
    return found
