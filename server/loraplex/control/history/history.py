"""The rings of a server's last hour, and reports of them.

Requests are counted into a slice of 10 s. The last 5 minutes are kept in such slices, the last hour in slices of a
minute, each the sum of six of them before anything is left out.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from loraplex.control.history.figures import (
    CACHED,
    COMPUTED,
    ERRORS,
    LIMITED,
    OUTPUT,
    REQUESTS,
    Figures,
    add_to,
    difference,
    first_token_place,
    gap_place,
    zeros,
)
from loraplex.control.history.slices import Kept, Key, OpenSlice, Slice
from loraplex.control.intervals import wilson_interval

Span = Literal["5m", "1h"]
Sort = Literal["errors", "error_rate", "limited", "tokens", "first_token", "requests"]
SLICE_S = 10
_IN_A_MINUTE = 6
_NUM = {"5m": 30, "1h": 60}
"""Closed slices of each span."""


@dataclass(frozen=True, slots=True)
class Server:
    """The process whose requests these are: an id of this start, its machine, and since when it counts."""

    id: str
    node: str
    since: datetime


class History:
    """The last hour of this process. One thread counts and takes pasts; a `Past` may be read in any. `clock` is
    monotonic seconds, `wall_clock` seconds since the epoch."""

    def __init__(
        self,
        node: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.server = Server(uuid.uuid4().hex[:8], node, datetime.fromtimestamp(wall_clock(), UTC))
        self.clock = clock
        self._wall_clock = wall_clock
        index = int(clock() // SLICE_S)
        self._open = OpenSlice(index)
        self._minute = OpenSlice(index // _IN_A_MINUTE)
        self._closed: dict[Span, deque[Slice]] = {
            "5m": deque(maxlen=_NUM["5m"]),
            "1h": deque(maxlen=_NUM["1h"]),
        }

    def count(
        self,
        tenant: str,
        adapter: tuple[str, int] | None,
        *,
        failed: bool = False,
        limited: bool = False,
        computed: int = 0,
        cached: int = 0,
        output: int = 0,
        first_token_s: float | None = None,
        gap_s: float | None = None,
    ) -> None:
        """Count a request that has ended. `adapter` is its name and the number of its version; None where the request
        ended before that was known. One without a `tenant` is in the sums alone. For the rest see `Figures`."""
        self._turn(self.clock())
        opened = self._open
        rows: list[array[int] | None] = [opened.total]
        if tenant:
            rows.append(opened.tenants.row((tenant, "", 0), failing=failed))
        if adapter is not None:
            rows.append(opened.adapters.row((tenant, *adapter), failing=failed))
        first = None if first_token_s is None else first_token_place(first_token_s)
        gap = None if gap_s is None else gap_place(gap_s)
        for row in rows:
            if row is None:
                continue
            row[REQUESTS] += 1
            if failed:
                row[ERRORS] += 1
            if limited:
                row[LIMITED] += 1
            row[COMPUTED] += computed
            row[CACHED] += cached
            row[OUTPUT] += output
            if first is not None:
                row[first] += 1
            if gap is not None:
                row[gap] += 1

    def past(self, span: Span) -> Past:
        """Take the last slices that have ended."""
        now = self.clock()
        self._turn(now)
        length, end = (SLICE_S, self._open.index)
        if span == "1h":
            length, end = (SLICE_S * _IN_A_MINUTE, self._minute.index)
        known = {one.index: one for one in self._closed[span]}
        indices = range(end - _NUM[span], end)
        zero = self._wall_clock() - now
        return Past(
            self.server,
            length,
            [zero + index * length for index in indices],
            [known.get(index) for index in indices],
        )

    def _turn(self, now: float) -> None:
        """Close what has ended by now. A clock that went back adds to the slice that is open."""
        index = int(now // SLICE_S)
        if index <= self._open.index:
            return
        if self._open.total[REQUESTS]:
            self._minute.take(self._open)
            self._closed["5m"].append(self._open.close())
        self._open = OpenSlice(index)
        if index // _IN_A_MINUTE > self._minute.index:
            if self._minute.total[REQUESTS]:
                self._closed["1h"].append(self._minute.close())
            self._minute = OpenSlice(index // _IN_A_MINUTE)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One tenant, or one version of one of its adapters: `adapter` is then its name, `(base)` of the base model, whose
    `version` is 0."""

    tenant: str
    adapter: str
    version: int
    figures: Figures


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a span by slice, and by tenant and adapter over all of it."""

    server: Server
    slice_s: int
    slices: Sequence[tuple[datetime, Figures]]
    """Each with its beginning, the oldest first. Without a request all counts are 0."""
    total: Figures
    tenants: Sequence[ReportRow]
    other_tenants: Figures
    """The part of the total that no row of `tenants` has."""
    adapters: Sequence[ReportRow]
    other_adapters: Figures
    exact: bool
    """Whether no slice left a tenant or an adapter out. Where one did, rows, and the figures of one tenant or adapter,
    may be too small."""


@dataclass(frozen=True, slots=True)
class Past:
    """Slices of a span, the oldest first; None where no request ended. `starts`: seconds since the epoch."""

    server: Server
    slice_s: int
    starts: Sequence[float]
    slices: Sequence[Slice | None]

    def report(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        sort: Sort = "errors",
        limit: int = 100,
    ) -> Report:
        """The figures of all requests, of one tenant, of the adapters of one name, or of both; the first `limit` rows
        by `sort`, the largest first. With an `adapter` there are no rows of tenants."""

        def fits(key: Key) -> bool:
            return (tenant is None or key[0] == tenant) and (adapter is None or key[1] == adapter)

        known = [one for one in self.slices if one is not None]
        tenants = _Sums([] if adapter is not None else [one.tenants for one in known], fits)
        adapters = _Sums([one.adapters for one in known], fits)
        of_slices = [_total(one, tenant, adapter, fits) for one in self.slices]
        total = zeros()
        for row in of_slices:
            add_to(total, row)
        starts = (datetime.fromtimestamp(start, UTC) for start in self.starts)
        tenant_rows, other_tenants = tenants.first(sort, limit, total)
        adapter_rows, other_adapters = adapters.first(sort, limit, total)
        return Report(
            server=self.server,
            slice_s=self.slice_s,
            slices=list(zip(starts, map(Figures.of, of_slices), strict=True)),
            total=Figures.of(total),
            tenants=tenant_rows,
            other_tenants=other_tenants,
            adapters=adapter_rows,
            other_adapters=other_adapters,
            exact=not (tenants.cut or adapters.cut),
        )


def _total(
    one: Slice | None, tenant: str | None, adapter: str | None, fits: Callable[[Key], bool]
) -> array[int]:
    """The sums of a slice: of all its requests, or of the rows that fit."""
    if one is None:
        return zeros()
    if tenant is None and adapter is None:
        return one.total
    row = zeros()
    for key, part in one.tenants if adapter is None else one.adapters:
        if fits(key):
            add_to(row, part)
    return row


class _Sums:
    """Rows of several slices, added by key."""

    def __init__(self, slices: Sequence[Kept], fits: Callable[[Key], bool]) -> None:
        self.cut = any(one.cut for one in slices)
        self._rows: dict[Key, array[int]] = {}
        for one in slices:
            for key, row in one:
                if fits(key):
                    add_to(self._rows.setdefault(key, zeros()), row)

    def first(self, sort: Sort, limit: int, total: array[int]) -> tuple[list[ReportRow], Figures]:
        """The largest rows, and the figures of all that they do not have of `total`."""
        rows = [ReportRow(*key, Figures.of(row)) for key, row in self._rows.items()]
        rows.sort(key=lambda row: (row.tenant, row.adapter, row.version))
        rows.sort(key=lambda row: _size(row.figures, sort), reverse=True)
        shown, rest = rows[:limit], total
        for row in shown:
            rest = difference(rest, self._rows[row.tenant, row.adapter, row.version])
        return shown, Figures.of(rest)


def _size(figures: Figures, sort: Sort) -> tuple[float, ...]:
    """The order of rows; the number of requests decides between equals."""
    if sort == "errors":
        return figures.errors, figures.limited, figures.requests
    if sort == "error_rate":
        # The lower end: one error of one request says little.
        return wilson_interval(figures.errors, max(1, figures.requests)).low, figures.requests
    if sort == "limited":
        return figures.limited, figures.errors, figures.requests
    if sort == "tokens":
        return figures.tokens, figures.requests
    if sort == "first_token":
        return figures.first_token_seconds or 0.0, figures.requests
    return (figures.requests,)
