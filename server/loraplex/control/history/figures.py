"""Figures of a number of requests: a row of whole numbers that can be added, counts first, then buckets of times."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

REQUESTS, ERRORS, LIMITED, COMPUTED, CACHED, OUTPUT = range(6)
"""Places in a row. Prompt tokens are computed or cached."""
FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)
GAP_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.045, 0.07, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Upper bounds of buckets, in seconds; a value that equals one is counted with it. One more bucket is above them."""
_FIRST_TOKEN = OUTPUT + 1
_GAP = _FIRST_TOKEN + len(FIRST_TOKEN_S) + 1
WIDTH = _GAP + len(GAP_S) + 1
_ZEROS = bytes(8 * WIDTH)


def zeros() -> array[int]:
    """A row of nothing, 64 bits a place."""
    return array("Q", _ZEROS)


def first_token_place(seconds: float) -> int:
    """The place of the bucket of a time to the first token."""
    return _FIRST_TOKEN + bisect_left(FIRST_TOKEN_S, seconds)


def gap_place(seconds: float) -> int:
    """The place of the bucket of a time between two tokens."""
    return _GAP + bisect_left(GAP_S, seconds)


def add_to(row: array[int], more: Sequence[int]) -> None:
    """Add `more` to `row`, in place."""
    row[:] = array("Q", map(add, row, more))


def difference(row: Sequence[int], less: Sequence[int]) -> array[int]:
    """The difference of two rows, at least 0 at each place."""
    return array("Q", (max(0, one - other) for one, other in zip(row, less, strict=True)))


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a row. Times in seconds, at the median and at 95 %; None where none was measured."""

    requests: int
    errors: int
    """Requests that failed by the server's doing."""
    limited: int
    """Requests that were refused by a limit: 429."""
    computed_tokens: int
    """Prompt tokens that were not in the prefix cache; `cached_tokens` were."""
    cached_tokens: int
    output_tokens: int
    first_token_seconds: float | None
    """From the arrival of a request to its first token."""
    first_token_p95_seconds: float | None
    gap_seconds: float | None
    """The mean time between the tokens of a request."""
    gap_p95_seconds: float | None

    @classmethod
    def of(cls, row: Sequence[int]) -> Figures:
        first, gaps = row[_FIRST_TOKEN:_GAP], row[_GAP:]
        return cls(
            row[REQUESTS],
            row[ERRORS],
            row[LIMITED],
            row[COMPUTED],
            row[CACHED],
            row[OUTPUT],
            quantile(first, FIRST_TOKEN_S, 0.5),
            quantile(first, FIRST_TOKEN_S, 0.95),
            quantile(gaps, GAP_S, 0.5),
            quantile(gaps, GAP_S, 0.95),
        )

    @property
    def tokens(self) -> int:
        return self.computed_tokens + self.cached_tokens + self.output_tokens


def quantile(counts: Sequence[int], bounds: Sequence[float], part: float) -> float | None:
    """The value below which `part` of the observations lie, between the bounds of its bucket in proportion. Of the
    bucket above all bounds, the last bound. None without observations."""
    rank, below = part * sum(counts), 0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            if place == len(bounds):
                return bounds[-1]
            low = bounds[place - 1] if place else 0.0
            return low + (bounds[place] - low) * (rank - below) / count
        below += count
    return None
