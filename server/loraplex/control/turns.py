"""Rows of all tenants in a list of bounded length: the tenants in turn, so that one with many does not hide others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_NAMED = 10
"""Tenants of `more` that are named."""


@dataclass(frozen=True, slots=True)
class Turns(Generic[T]):
    """The first rows of a list. `total` counts all that there are, and `more` those of each tenant that are left out,
    the most first; tenants without a row here may be missing in it."""

    rows: Sequence[T]
    total: int
    more: Sequence[tuple[str, int]]


def in_turns(found: Iterable[T], tenant_of: Callable[[T], str], limit: int) -> Turns[T]:
    """The first row of each tenant, then the second of each, and so on, at most `limit`; those of one turn in the order
    in which they came."""
    turns: Counter[str] = Counter()
    placed: list[tuple[int, T]] = []
    for row in found:
        tenant = tenant_of(row)
        placed.append((turns[tenant], row))
        turns[tenant] += 1
    placed.sort(key=lambda one: one[0])
    rows = [row for _, row in placed[:limit]]
    turns.subtract(map(tenant_of, rows))
    more = [(tenant, count) for tenant, count in turns.most_common(MAX_NAMED) if count > 0]
    return Turns(rows, len(placed), more)
