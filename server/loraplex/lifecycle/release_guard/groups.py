"""Units that wait for their group, and the evidence of the groups before; a unit is a user, or a request where each
request draws its arm.

All metrics take a group at the same time: what one metric has seen of the arms, no other one bets on any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loraplex.lifecycle.release_guard.comparison import Comparison, Reading, Unit
from loraplex.lifecycle.release_guard.evidence import EFFECTS
from loraplex.lifecycle.release_guard.power import EFFECT, units_of_ranks, units_of_rate
from loraplex.lifecycle.release_guard.rules import METRICS, MetricName, Rules

LEAST, MOST = 16, 64
"""Units of a group. Fewer could prove little; more wait longer."""
MAX_WAITING = MOST
"""Units that wait where one arm gives too few; of more, those that ended last are kept."""
TOGETHER_S = 2.0
"""Units that ended so long before any of the other arm are left out, where enough are left: an outage must not set one
arm's first numbers in it against the other's from before."""
_SMALLER_ARM = 3.2
"""Units of the smaller arm that a group is to have in the mean, up to `MOST` of both."""
_SPARSE = 10
"""A metric is not waited for where only one in this many of an arm's units has a number of it, or fewer."""
_MOST_CONTROL = 16
"""Units of the control for one of the candidate; more would add little."""


class Arms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The two versions, with their weights, above 0. `unit`: what draws an arm."""

    control: int
    candidate: int
    control_weight: float
    candidate_weight: float
    unit: Unit = "user"

    def has(self, version: int) -> bool:
        return version in (self.control, self.candidate)

    @property
    def control_sample(self) -> float:
        """The part of the control's units that counts."""
        return min(1.0, _MOST_CONTROL * self.candidate_weight / self.control_weight)

    @property
    def chance(self) -> float:
        """The candidate's part of the units that count."""
        return self.candidate_weight / (self.candidate_weight + self.control_weight * self.control_sample)

    @property
    def counted(self) -> float:
        """The part of both arms' units that counts."""
        control, candidate = self.control_weight, self.candidate_weight
        return (candidate + control * self.control_sample) / (candidate + control)


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A unit that waits: 32 bits of its key's hash, when it ended, and its number for each metric that says
    something."""

    key: int
    is_candidate: bool
    at: float
    numbers: dict[MetricName, float]


class GroupsState(msgspec.Struct, forbid_unknown_fields=True):
    """The state of `Groups` as JSON."""

    comparisons: list[Comparison]
    waiting: list[Row] = []

    @classmethod
    def start(cls, rules: Rules) -> GroupsState:
        """A state without evidence."""
        return cls([Comparison.start(metric, margin) for metric, margin in rules.margins.items()])


class Groups:
    """A test that takes numbers of units and gives evidence. `part` is its part of the allowed false alarms."""

    def __init__(self, rules: Rules, arms: Arms, state: GroupsState, part: float) -> None:
        self._rules = rules
        self._arms = arms
        self.state = state
        self.threshold = 1 / (rules.max_false_alarm * part)
        smaller = min(arms.chance, 1 - arms.chance)
        self._least = min(MOST, max(LEAST, math.ceil(_SMALLER_ARM / smaller)))

    def add(self, row: Row) -> None:
        """Take a unit's numbers, for the next `settle`."""
        self.state.waiting.append(row)
        for comparison in self.state.comparisons:
            if (number := row.numbers.get(comparison.metric)) is not None:
                comparison.count(number, is_candidate=row.is_candidate)

    def settle(self) -> None:
        """Compare those that wait, if they are enough for a group."""
        waiting = sorted(self.state.waiting, key=lambda row: row.at)
        if not self._is_enough(waiting):
            self.state.waiting = waiting = waiting[-MAX_WAITING:]
            if not self._is_enough(waiting):
                return
        # The order of the ends may depend on the arms; the hash does not.
        waiting = sorted(self._together(waiting), key=lambda row: row.key)
        size = math.ceil(len(waiting) / math.ceil(len(waiting) / MOST))
        for first in range(0, len(waiting), size):
            group = waiting[first : first + size]
            for comparison in self.state.comparisons:
                metric = comparison.metric
                numbers = [(row.numbers[metric], row.is_candidate) for row in group if metric in row.numbers]
                comparison.compare(numbers, self._rules.margins[metric])
        self.state.waiting = []

    def _is_enough(self, rows: Sequence[Row]) -> bool:
        """Whether both arms gave what they would give by chance, or half of it. A slow candidate's numbers come after
        the control's, and of few users none comes again."""
        candidates = sum(row.is_candidate for row in rows)
        chance = self._arms.chance
        return (
            len(rows) >= self._least
            and candidates >= max(1, len(rows) * chance // 2)
            and len(rows) - candidates >= max(1, len(rows) * (1 - chance) // 2)
        )

    def _together(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The rows without those that ended long before any of the other arm."""
        other_at = max(min(row.at for row in rows if row.is_candidate is arm) for arm in (True, False))
        late = [row for row in rows if row.at >= other_at - TOGETHER_S]
        return late if self._is_enough(late) else rows

    @property
    def e_value(self) -> float:
        """The weighted mean of the metrics' evidence."""
        return math.fsum(self._rules.share(of.metric) * of.e_value for of in self.state.comparisons)

    def readings(self) -> list[Reading]:
        """The metrics as they stand."""
        rules = self._rules
        return [
            of.reading(rules.margins[of.metric], rules.share(of.metric), self._needs(of), self._arms.unit)
            for of in self.state.comparisons
        ]

    def _needs(self, of: Comparison) -> int:
        """Units of both arms, counted or not, that are missing until the metric could have shown a gross fault. Both
        arms must have theirs: a unit more of the one is none of the other."""
        metrics, chance = self.state.comparisons, self._arms.chance
        log_threshold = math.log(self.threshold / self._rules.share(of.metric))
        wanted = units_of_ranks(chance, log_threshold)
        control, candidate = of.control.count, of.candidate.count
        allowed = (of.control.mean or 0.0) + self._rules.margins[of.metric]
        is_rate = METRICS[of.metric].is_rate
        most_control = max(metric.control.count for metric in metrics)
        most_candidate = max(metric.candidate.count for metric in metrics)
        is_sparse = control <= most_control / _SPARSE or candidate <= most_candidate / _SPARSE
        if is_sparse or (is_rate and allowed + EFFECT > 1):
            # Little to compare with, or no room to become so much worse, if enough units of any metric show that.
            control, candidate = most_control, most_candidate
        elif is_rate:
            wanted = units_of_rate(allowed, allowed + EFFECT, chance, log_threshold)
        have = min(candidate / chance, control / (1 - chance))
        return max(0, math.ceil((wanted - have) / self._arms.counted))


def problem_of(state: GroupsState, rules: Rules) -> str | None:
    """Say what is wrong with a state whose types are right; None if nothing is."""
    if [comparison.metric for comparison in state.comparisons] != list(rules.margins):
        return "its metrics are not those of its rules"
    if len(state.waiting) > MAX_WAITING:
        return "more units wait than a group has"
    for comparison in state.comparisons:
        evidence = comparison.evidence
        if len(evidence.log_wealth) != len(EFFECTS):
            return f"{comparison.metric} has evidence of another form"
        if not (
            0 <= evidence.control_sum <= evidence.control_count
            and evidence.margin >= 0
            and 0 < (0.5 if evidence.prior is None else evidence.prior) < 1
        ):
            return f"{comparison.metric} has sums out of range"
    return None
