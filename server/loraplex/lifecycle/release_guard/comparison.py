"""One metric of two arms within one window: the numbers that wait for their block, and the evidence of those before.

A rate's numbers are used as they are. Of any other metric, a number becomes its rank among the control's last numbers,
and the candidate's are divided by 1 + margin before: a sequential test of stochastic order, whatever the distribution.
Its null hypothesis: for every x, the candidate exceeds (1 + margin) x no more often than the control exceeds x.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from loraplex.lifecycle.release_guard.evidence import Evidence
from loraplex.lifecycle.release_guard.rules import METRICS, MetricName

MAX_RECENT = 64
"""Numbers of an arm that are kept, to rank by and to show medians of."""
OVERDUE = 1e300
"""The length of an answer that has not ended: longer than any. JSON has no infinity."""
MAX_WAITING = 64
"""Numbers of the candidate that wait for those of the control."""
_MAX_LOG = 700.0
"""Keeps an e-value finite."""


class Reading(msgspec.Struct, frozen=True):
    """A metric as it stands. `candidate` and `control`: shares of a rate, else medians of the last numbers, infinite
    where most answers have not ended, None without a number. `bound`: what the control and the margin allow. Counts
    are of keys. `e_value` is the metric's own; `share` its weight in the sum."""

    metric: MetricName
    e_value: float
    share: float
    margin: float
    candidate: float | None
    control: float | None
    bound: float | None
    num_candidate: int
    num_control: int

    @property
    def shown(self) -> str:
        """The reading in one line."""
        candidate, control, bound = map(_shown, (self.candidate, self.control, self.bound))
        return f"{self.metric} is {candidate} of {self.num_candidate} users; the control's {control} allows {bound}"


class Comparison(msgspec.Struct, forbid_unknown_fields=True):
    """`num_control` and `num_candidate` are the sizes of a block. Between looks, the control's last numbers wait for
    one block, and up to `MAX_WAITING` of the candidate's."""

    metric: MetricName
    evidence: Evidence
    num_control: int
    num_candidate: int
    waiting_control: list[float] = []
    waiting_candidate: list[float] = []
    recent_control: list[float] = []
    recent_candidate: list[float] = []

    @classmethod
    def start(cls, metric: MetricName, margin: float, num_control: int, num_candidate: int) -> Comparison:
        known = METRICS[metric]
        # The margin of a rank is in the division already.
        evidence = Evidence(margin if known.is_rate else 0.0, known.prior)
        return cls(metric, evidence, num_control, num_candidate)

    def add(self, number: float, *, is_candidate: bool) -> None:
        """Take one key's number of this metric, for the next `settle`."""
        (self.waiting_candidate if is_candidate else self.waiting_control).append(number)

    def settle(self, margin: float) -> None:
        """Compare what was added since the last look, in as many blocks as there are. A block has the candidate's
        numbers in their order, and those of the control that came last: an outage must not set its first numbers of
        one arm against the other's from before. So of a look both arms are added first."""
        num_a, num_b = self.num_control, self.num_candidate
        # Half a block of the control will do: a candidate's number that waits would be found late.
        least = max(1, num_a // 2)
        blocks = min(len(self.waiting_control) // least, len(self.waiting_candidate) // num_b)
        size = min(num_a, len(self.waiting_control) // max(1, blocks))
        control = self.waiting_control[len(self.waiting_control) - blocks * size :]
        for block in range(blocks):
            self._compare(
                control[block * size : (block + 1) * size],
                self.waiting_candidate[block * num_b : (block + 1) * num_b],
                margin,
            )
        if blocks:
            self.waiting_control.clear()
        del self.waiting_control[:-num_a]
        del self.waiting_candidate[: blocks * num_b]
        del self.waiting_candidate[:-MAX_WAITING]

    def _compare(self, control: Sequence[float], candidate: Sequence[float], margin: float) -> None:
        if METRICS[self.metric].is_rate:
            self.evidence.add(control, candidate)
        else:
            # Earlier numbers alone, so that a rank does not depend on the block that it is for.
            earlier = sorted(self.recent_control)
            self.evidence.add(
                [_rank(number, earlier) for number in control],
                [_rank(number / (1 + margin), earlier) for number in candidate],
            )
        for recent, numbers in ((self.recent_control, control), (self.recent_candidate, candidate)):
            recent.extend(numbers)
            del recent[:-MAX_RECENT]

    @property
    def e_value(self) -> float:
        return math.exp(min(self.evidence.log_e_value, _MAX_LOG))

    def reading(self, margin: float, share: float) -> Reading:
        """The metric as it stands. `share`: its weight in the sum."""
        evidence = self.evidence
        if METRICS[self.metric].is_rate:
            control = _mean(evidence.control_sum, evidence.control_count)
            candidate = _mean(evidence.candidate_sum, evidence.candidate_count)
            bound = None if control is None else control + margin
        else:
            control, candidate = _median(self.recent_control), _median(self.recent_candidate)
            bound = None if control is None else control * (1 + margin)
        return Reading(
            self.metric,
            self.e_value,
            share,
            margin,
            candidate,
            control,
            bound,
            evidence.candidate_count,
            evidence.control_count,
        )


def _rank(number: float, earlier: Sequence[float]) -> float:
    """Share of the sorted numbers below this one, equal ones counted half; 0.5 among none."""
    if number >= OVERDUE / 100:
        return 1.0
    if not earlier:
        return 0.5
    return (bisect_left(earlier, number) + bisect_right(earlier, number)) / (2 * len(earlier))


def _shown(number: float | None) -> str:
    if number is None:
        return "unknown"
    return "without end" if math.isinf(number) else f"{number:.3g}"


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _median(numbers: Sequence[float]) -> float | None:
    if not numbers:
        return None
    middle = sorted(numbers)[len(numbers) // 2]
    return math.inf if middle >= OVERDUE else middle
