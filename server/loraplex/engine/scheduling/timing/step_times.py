"""Predicted seconds of a step, from times measured at the start and corrected by every step since.

A step takes a time to read the weights, and more for its rows, each position that a row attends to, each row that a
token is sampled from, each rank of an adapter that acts on a row, and each position that is scored: whose logits
are kept for log probabilities. Pooling takes none that can be measured. The prediction grows with each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from loraplex.engine.config import Charges
from loraplex.engine.scheduling.timing.step_costs import StepCosts, least_times, on_line
from loraplex.engine.types import ScheduledSequence

_RATE = 0.1
"""The part of a step's error that corrects the terms of its prediction."""
_MOST_ERROR = 1.5
"""A step that took more than this multiple of its prediction, or less than its inverse, counts as one that took just
that: a pause of the machine changes little."""
_LEAST_FACTOR = 0.5
_MOST_FACTOR = 64.0
"""Bounds of what a term is corrected by. Times at the start are the least of several, on a machine that may be busy
later; the lower bound is the floor that no step corrects a term below."""
_LEAST_PAIR = 1e-5
_LEAST_LOGITS = 0.1
"""Floors of what an attended position takes, and the logits of one, as shares of a row."""


@dataclass(slots=True)
class StepLoad:
    """The work of a step, as far as time depends on it."""

    rows: int = 0
    pairs: float = 0.0  # positions attended to, summed over the rows
    sampled: int = 0  # rows that a token is sampled from
    ranks: int = 0  # ranks of the adapters, summed over the rows that they act on
    scored: int = 0  # positions of prompts whose logits are kept

    def add(self, start: int, count: int, *, sampled: int = 0, rank: int = 0, scored: int = 0) -> None:
        """Add `count` positions of one sequence behind `start` others."""
        self.rows += count
        self.pairs += count * (start + (count + 1) / 2)
        self.sampled += sampled
        self.ranks += count * rank
        self.scored += scored

    def add_slice(self, part: ScheduledSequence) -> None:
        ref = part.request.adapter if part.slot >= 0 else None
        self.add(
            part.start,
            part.num_tokens,
            sampled=(1 + len(part.drafted)) * part.samples,
            rank=0 if ref is None else ref.rank,
            scored=len(part.targets),
        )

    def with_prompt(self, start: int, count: int, *, rank: int = 0, scored: int = 0) -> StepLoad:
        """This and `count` positions of a prompt."""
        load = StepLoad(self.rows, self.pairs, self.sampled, self.ranks, self.scored)
        load.add(start, count, rank=rank, scored=scored)
        return load

    @classmethod
    def of(cls, slices: Iterable[ScheduledSequence]) -> StepLoad:
        load = cls()
        for part in slices:
            load.add_slice(part)
        return load


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Seconds measured at the start: of a step by its rows, from one on, where all are of a prompt without a context;
    and of one more attended position, sampled row and scored position. `costs`: those of decoding steps by their rows.
    `sizes`: rows that steps are padded to, ascending; empty: none is."""

    rows: Mapping[int, float]
    pair: float
    sample: float
    score: float
    costs: StepCosts
    sizes: tuple[int, ...] = ()


class StepTimes:
    """Predicts steps, and corrects itself by what they took. No clock of its own."""

    def __init__(self, measured: MeasuredTimes) -> None:
        self.measured = measured
        self._rows = least_times(measured.rows)
        most = max(self._rows)
        per_row = max(self._rows[most] - self._rows[1], 0.01 * self._rows[1]) / max(1, most - 1)
        self._each = (
            max(measured.pair, _LEAST_PAIR * per_row),
            max(measured.sample, _LEAST_LOGITS * per_row),
            Charges().per_rank * per_row,
            max(measured.score, _LEAST_LOGITS * per_row),
        )
        self._factors = [1.0] * 6

    @property
    def one_row(self) -> float:
        """Seconds of a step of one row, as measured at the start."""
        return self._rows[1]

    def seconds(self, load: StepLoad) -> float:
        """The predicted time of a step; 0 of one without rows."""
        return sum(self._terms(load))

    def most(
        self, load: StepLoad, start: int, count: int, seconds: float, *, rank: int = 0, scores: bool = False
    ) -> int:
        """The most positions of `count` behind `start` others of a sequence that `load` may take beside what it has
        for a step of `seconds`; 0 if none fits. `scores`: each is scored."""
        low, high = 0, count
        while low < high:
            middle = (low + high + 1) // 2
            more = load.with_prompt(start, middle, rank=rank, scored=middle if scores else 0)
            low, high = (middle, high) if self.seconds(more) <= seconds else (low, middle - 1)
        return low

    def lengthened(self, before: StepLoad, after: StepLoad) -> float:
        """The part by which a step of `before`, of one row at least, becomes longer with what `after` has more. Rows
        count by the costs of decoding steps, which show the tiles of kernels."""
        cost = self.measured.costs.cost
        behind = replace(after, rows=before.rows, sampled=before.sampled)
        return cost(after.rows) / cost(before.rows) + self.seconds(behind) / self.seconds(before) - 2.0

    def took(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took `seconds`. Each term is corrected by its share of the prediction."""
        terms = self._terms(load)
        expected = sum(terms)
        if expected <= 0.0 or not seconds > 0.0:
            return
        error = min(max(seconds / expected, 1 / _MOST_ERROR), _MOST_ERROR) - 1.0
        for index, term in enumerate(terms):
            factor = self._factors[index] * (1.0 + _RATE * error * term / expected)
            self._factors[index] = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)

    def _terms(self, load: StepLoad) -> tuple[float, ...]:
        if load.rows == 0:
            return (0.0,)
        fixed, rows, pairs, sampled, ranks, scored = self._factors
        pair, sample, rank, score = self._each
        return (
            fixed * self.one_row,
            rows * (self._of_rows(load.rows) - self.one_row),
            pairs * pair * load.pairs,
            sampled * sample * load.sampled,
            ranks * rank * load.ranks,
            scored * score * load.scored,
        )

    def _of_rows(self, rows: int) -> float:
        """Seconds of the rows alone, the weights' reading included, as measured."""
        sizes = self.measured.sizes
        if sizes and rows <= sizes[-1]:
            rows = sizes[bisect_left(sizes, rows)]
        return on_line(self._rows, rows)
