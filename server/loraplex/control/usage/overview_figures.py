"""Figures of adapters from the ledger: sums of their requests, and medians of the time to the first token. A server
keeps the columns that they need of up to `MAX_ROWS` rows; what has more rows is summed up by the database."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median_low
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    String,
    case,
    cast,
    extract,
    func,
    literal,
    select,
    tuple_,
    type_coerce,
    union_all,
)
from sqlalchemy.orm import Session

from loraplex.control.db.database import Database
from loraplex.control.db.tables import Usage, UtcDateTime
from loraplex.control.usage.outcome import FAILURES

Key = tuple[str, str]
"""A tenant and a name."""
MAX_ROWS = 500_000
"""Rows that a server keeps, of 29 bytes each."""
MAX_NAMES = 200_000
"""Names of kept rows; beyond, all is forgotten and read again."""
SPAN = timedelta(minutes=10)
"""Rows of such a time are kept, read again and forgotten together."""
_READ_ROWS = 50_000
"""About the rows that one statement reads."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Sums:
    """Requests of one name: those that ended, those that failed by the server's doing, the tokens of prompts
    and answers, and when the last one ended."""

    requests: int
    errors: int
    tokens: int
    last_used_at: datetime


class Figures(Protocol):
    """The figures of the rows since a time. Both raise DatabaseUnavailable, DatabaseBusy."""

    def sums(self) -> dict[Key, Sums]:
        """Those of each name that was asked."""
        ...

    def medians(self, names: set[Key] | None = None) -> dict[Key, float]:
        """The median time to the first token of these names, of all with None, in seconds, where one came. Of an even
        number of requests it is the lower one of the two in the middle."""
        ...


class AskedOfAdapters:
    """Answers from rows that it keeps. A row of the ledger never changes, and none of the last day is deleted. So rows
    of a time are the same while their number is, and each call counts them in the database: a row that came late, or
    that another server wrote, is in the next answer. May be called by several threads."""

    def __init__(self, database: Database, *, max_rows: int = MAX_ROWS) -> None:
        self._on_postgres = database.on_postgres
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._places: dict[Key, int] = {}
        self._kept: dict[_Span, _Rows] = {}

    def since(self, session: Session, since: datetime) -> Figures:
        """Figures of what ended since then, which is at most a day ago. Raises DatabaseUnavailable, DatabaseBusy."""
        spans = _spans(since)
        with self._lock:
            counts = dict(zip(spans, _count(session, spans), strict=True))
            if sum(counts.values()) > self._max_rows:
                return _SummedUp(session, since)
            if len(self._places) > MAX_NAMES:
                self._places, self._kept = {}, {}
            # The last span of an earlier answer has an end since, and its rows are among those of another.
            self._kept = {one: rows for one, rows in self._kept.items() if one.end or one == spans[-1]}
            changed = [one for one in spans if counts[one] != len(self._kept.get(one, _NOTHING).at)]
            for together in _runs(changed, counts):
                self._read(session, together)
            found = [self._kept[one] for one in spans if counts[one]]
            self._forget()
            return _OfRows(list(self._places), _Rows.join(found), _micros(since))

    def _read(self, session: Session, spans: Sequence[_Span]) -> None:
        """Keep the rows of spans that follow each other."""
        # No datetime is made for each row: that takes as long as all the rest.
        ended: ColumnElement[Any] = type_coerce(Usage.at, String)
        if self._on_postgres:
            ended = cast(extract("epoch", Usage.at) * 1_000_000, BigInteger)
        query = (
            select(
                Usage.tenant_id,
                Usage.adapter,
                ended,
                Usage.status,
                Usage.prompt_tokens + Usage.completion_tokens,
                Usage.first_token_s,
            )
            .where(*_within(spans[0].start, spans[-1].end))
            .order_by(Usage.at)
        )
        rows = session.connection().execute(query).all()  # without the ORM, which doubles the time
        tenants, names, at, statuses, tokens, firsts = zip(*rows, strict=True) if rows else ((),) * 6
        places = self._places
        read = _Rows(
            name=np.array(
                [places.setdefault(key, len(places)) for key in zip(tenants, names, strict=True)], np.int32
            ),
            at=np.array(at, "datetime64[us]").astype(np.int64),
            error=np.array([status in FAILURES for status in statuses], np.bool_),
            tokens=np.array(tokens, np.int64),
            first_s=np.array(firsts, np.float64),
        )
        ends = np.searchsorted(read.at, [_micros(one.start) for one in spans[1:]]).tolist()
        for span, start, end in zip(spans, [0, *ends], [*ends, len(rows)], strict=True):
            self._kept[span] = read.part(slice(start, end))

    def _forget(self) -> None:
        """Forget what no answer can need any more, then the oldest beyond the bound."""
        kept, left = dict[_Span, _Rows](), self._max_rows
        for span, rows in sorted(self._kept.items(), key=lambda one: one[0].start, reverse=True):
            left -= len(rows.at)
            if left >= 0 and span.start > datetime.now(UTC) - timedelta(days=1) - 2 * SPAN:
                kept[span] = rows
        self._kept = kept


@dataclass(frozen=True, slots=True)
class _Span:
    """start ≤ t < end. The last one has no end, as the clock of another server may be ahead."""

    start: datetime
    end: datetime | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns of rows in the order of `at`, all of shape [rows]."""

    name: NDArray[np.int32]
    """The place of tenant and name among those that are known."""
    at: NDArray[np.int64]
    """When the request ended, in microseconds since the epoch."""
    error: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    first_s: NDArray[np.float64]
    """Seconds to the first token; NaN where none came."""

    def part(self, rows: slice | NDArray[np.bool_]) -> _Rows:
        """A copy of these rows."""
        return _Rows(
            self.name[rows].copy(),
            self.at[rows].copy(),
            self.error[rows].copy(),
            self.tokens[rows].copy(),
            self.first_s[rows].copy(),
        )

    @classmethod
    def join(cls, parts: Sequence[_Rows]) -> _Rows:
        """One after another."""
        every = parts or [_NOTHING]
        return cls(
            np.concatenate([one.name for one in every]),
            np.concatenate([one.at for one in every]),
            np.concatenate([one.error for one in every]),
            np.concatenate([one.tokens for one in every]),
            np.concatenate([one.first_s for one in every]),
        )


_NOTHING = _Rows(
    np.empty(0, np.int32),
    np.empty(0, np.int64),
    np.empty(0, np.bool_),
    np.empty(0, np.int64),
    np.empty(0, np.float64),
)


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _spans(since: datetime) -> list[_Span]:
    """From the one that `since` lies in to the one that has not ended."""
    start, now = since - (since - _EPOCH) % SPAN, datetime.now(UTC)
    spans = list[_Span]()
    while start + SPAN <= now:
        spans.append(_Span(start, start + SPAN))
        start += SPAN
    return [*spans, _Span(start, None)]


def _within(start: datetime, end: datetime | None) -> list[ColumnElement[bool]]:
    bounds = [Usage.at >= literal(start, UtcDateTime())]
    return bounds if end is None else [*bounds, Usage.at < literal(end, UtcDateTime())]


def _count(session: Session, spans: Sequence[_Span]) -> list[int]:
    """The number of each one's rows, from the index by time alone."""
    counts = [
        select(literal(place).label("place"), func.count())
        .select_from(Usage)
        .where(*_within(one.start, one.end))
        for place, one in enumerate(spans)
    ]
    return [
        count for _, count in sorted((place, count) for place, count in session.execute(union_all(*counts)))
    ]


def _runs(spans: Sequence[_Span], counts: dict[_Span, int]) -> Iterable[list[_Span]]:
    """Those that follow each other in one list, of up to `_READ_ROWS` rows unless one span alone has more."""
    run, rows = list[_Span](), 0
    for span in spans:
        if run and (run[-1].end != span.start or rows + counts[span] > _READ_ROWS):
            yield run
            run, rows = [], 0
        run.append(span)
        rows += counts[span]
    if run:
        yield run


class _OfRows:
    """Figures of kept rows. `keys` has the tenant and name of each place."""

    def __init__(self, keys: Sequence[Key], rows: _Rows, since: int) -> None:
        self._keys = keys
        self._rows = rows.part(rows.at >= since)

    def sums(self) -> dict[Key, Sums]:
        rows, num = self._rows, len(self._keys)
        requests = np.bincount(rows.name, minlength=num)
        errors = np.bincount(rows.name[rows.error], minlength=num)
        tokens, last = np.zeros(num, np.int64), np.zeros(num, np.int64)
        np.add.at(tokens, rows.name, rows.tokens)
        np.maximum.at(last, rows.name, rows.at)
        columns = (requests.tolist(), errors.tolist(), tokens.tolist(), last.tolist())
        return {
            key: Sums(asked, failed, used, _EPOCH + at * _MICROSECOND)
            for key, asked, failed, used, at in zip(self._keys, *columns, strict=True)
            if asked
        }

    def medians(self, names: set[Key] | None = None) -> dict[Key, float]:
        rows = self._rows
        came = ~np.isnan(rows.first_s)
        if names is not None:
            came &= np.array([key in names for key in self._keys], np.bool_)[rows.name]
        name, first_s = rows.name[came], rows.first_s[came]
        order = np.lexsort((first_s, name))
        places, starts, counts = np.unique(name[order], return_index=True, return_counts=True)
        middle = first_s[order][starts + (counts - 1) // 2]
        return {
            self._keys[place]: value for place, value in zip(places.tolist(), middle.tolist(), strict=True)
        }


class _SummedUp:
    """Figures that the database makes."""

    def __init__(self, session: Session, since: datetime) -> None:
        self._session = session
        self._since = Usage.at >= literal(since, UtcDateTime())

    def sums(self) -> dict[Key, Sums]:
        owner = _owner()
        query = select(
            owner,
            Usage.adapter,
            func.count(),
            func.sum(case((Usage.status.in_(sorted(FAILURES)), 1), else_=0)),
            cast(func.sum(Usage.prompt_tokens + Usage.completion_tokens), BigInteger),
            func.max(Usage.at),
        ).where(self._since)
        rows = self._session.execute(query.group_by(owner, Usage.adapter))
        return {(tenant, name): Sums(*sums) for tenant, name, *sums in rows}

    def medians(self, names: set[Key] | None = None) -> dict[Key, float]:
        return self._medians() if names is None else self._medians_of(names)

    def _medians(self) -> dict[Key, float]:
        owner = _owner()
        ranked = select(
            owner.label("tenant_id"),
            Usage.adapter,
            Usage.first_token_s,
            func.row_number()
            .over(partition_by=(owner, Usage.adapter), order_by=Usage.first_token_s)
            .label("place"),
            func.count().over(partition_by=(owner, Usage.adapter)).label("count"),
        ).where(self._since, Usage.first_token_s.is_not(None))
        rows = ranked.subquery()
        middle = rows.c.place * 2 - rows.c.count
        query = select(rows.c.tenant_id, rows.c.adapter, rows.c.first_token_s).where(middle >= 0, middle <= 1)
        return {(tenant, name): value for tenant, name, value in self._session.execute(query)}

    def _medians_of(self, names: set[Key]) -> dict[Key, float]:
        """The same of a few, which takes no sorting of all requests."""
        if not names:
            return {}
        query = select(Usage.tenant_id, Usage.adapter, Usage.first_token_s).where(
            self._since,
            Usage.first_token_s.is_not(None),
            tuple_(Usage.tenant_id, Usage.adapter).in_(sorted(names)),
        )
        times: dict[Key, list[float]] = defaultdict(list)
        for tenant, name, value in self._session.execute(query):
            times[tenant, name].append(value or 0.0)
        return {name: median_low(values) for name, values in times.items()}


def _owner() -> ColumnElement[str]:
    """The tenant of a row. By the column itself SQLite reads the whole ledger in the order of the index by tenant, a
    page for each row."""
    return Usage.tenant_id.concat("")
