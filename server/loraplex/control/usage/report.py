"""Sums of what was used, made by the database: over the rows of requests and the days that were rolled up, as one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    cast,
    func,
    literal,
    literal_column,
    select,
    tuple_,
    union_all,
)

from loraplex.control import rules
from loraplex.control.db.database import Database
from loraplex.control.db.tables import Usage, UsageDay, UtcDateTime
from loraplex.control.errors import InvalidValue
from loraplex.control.rules import InvalidCursor
from loraplex.control.types import Page
from loraplex.control.usage.columns import COUNTS, GROUPS, Bucket, Group

_COLUMNS: dict[Group, str] = {
    "tenant": "tenant_id",
    "key": "key_id",
    "adapter": "adapter",
    "version": "version",
    "status": "status",
}
_SQLITE = {"hour": "%Y-%m-%dT%H:00:00Z", "day": "%Y-%m-%dT00:00:00Z", "month": "%Y-%m-01T00:00:00Z"}
_POSTGRES = {
    "hour": 'YYYY-MM-DD"T"HH24":00:00Z"',
    "day": 'YYYY-MM-DD"T00:00:00Z"',
    "month": 'YYYY-MM"-01T00:00:00Z"',
}


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The usage of a group in a bucket. None where the sums are not parted by that. `adapter` is `records.BASE` for the
    base model, and `version` 0."""

    start: datetime | None
    tenant: str | None
    key: str | None
    adapter: str | None
    version: int | None
    status: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageReports:
    """The answer of `GET /usage`. Of a day that was rolled up the time within it is gone: it counts where its midnight
    (UTC) lies in the period, and in the hour of its midnight."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def sums(
        self,
        *,
        start: datetime,
        end: datetime,
        bucket: Bucket = "day",
        group_by: Sequence[Group] = (),
        tenant: str | None = None,
        limit: int = rules.DEFAULT_PAGE,
        cursor: str | None = None,
    ) -> Page[UsageSum]:
        """Requests that ended in start ≤ t < end, in the order of buckets, then of `group_by`. Raises InvalidValue,
        InvalidCursor, DatabaseUnavailable, DatabaseBusy."""
        rules.check_page_limit(limit)
        if start >= end:
            raise InvalidValue("'start' must lie before 'end'.", param="start")
        names = [*(["start"] if bucket != "none" else []), *group_by]
        query = self._query(start, end, bucket, group_by, tenant, names)
        keys = [query.selected_columns[name] for name in names]
        if cursor is not None:
            # Outside of the sums: a page begins behind the last group of the one before.
            inner = query.subquery()
            keys = [inner.c[name] for name in names]
            query = select(inner).where(tuple_(*keys) > tuple_(*_read_place(cursor, names)))
        with self._database.read(report=True) as session:
            rows = session.execute(query.order_by(*keys).limit(limit + 1)).mappings().all()

        def place(row: Any) -> str:
            return json.dumps([row[name] for name in names])

        return rules.make_page(rows, limit, place, _show)

    def _query(
        self,
        start: datetime,
        end: datetime,
        bucket: Bucket,
        group_by: Sequence[Group],
        tenant: str | None,
        names: Sequence[str],
    ) -> Select[Any]:
        parts = []
        for table, requests in ((Usage, literal(1)), (UsageDay, UsageDay.requests)):
            columns: list[ColumnElement[Any]] = [
                getattr(table, _COLUMNS[name]).label(name) for name in group_by
            ]
            if bucket != "none":
                columns.insert(0, self._bucket(table, bucket).label("start"))
            columns.append(requests.label("requests"))
            columns += [getattr(table, name).label(name) for name in COUNTS[1:]]
            part = select(*columns).where(
                table.at >= literal(start, UtcDateTime()), table.at < literal(end, UtcDateTime())
            )
            parts.append(part if tenant is None else part.where(table.tenant_id == tenant))
        rows = union_all(*parts).subquery()
        keys = [rows.c[name] for name in names]
        sums = [cast(func.coalesce(func.sum(rows.c[name]), 0), BigInteger).label(name) for name in COUNTS]
        query = select(*keys, *sums)
        return query.group_by(*keys) if keys else query

    def _bucket(self, table: type[Usage] | type[UsageDay], bucket: Bucket) -> ColumnElement[Any]:
        # As text within the statement: PostgreSQL takes no parameter for the same expression twice.
        if self._database.on_postgres:
            form: ColumnElement[str] = literal_column(f"'{_POSTGRES[bucket]}'")
            return func.to_char(func.timezone("UTC", table.at), form)
        return func.strftime(literal_column(f"'{_SQLITE[bucket]}'"), table.at)


def _read_place(cursor: str, names: Sequence[str]) -> list[str | int]:
    try:
        place = json.loads(rules.read_cursor(cursor) or "")
    except ValueError:
        place = None
    kinds = [int if name == "version" else str for name in names]
    if not isinstance(place, list) or [type(value) for value in place] != kinds:
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    # JSON spells what no name has and not every database takes: NUL, halves of a character.
    if not all(
        value.isprintable() if isinstance(value, str) else -(2**31) <= value < 2**31 for value in place
    ):
        raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
    return place


def _show(row: Any) -> UsageSum:
    start = row.get("start")
    return UsageSum(
        start=None if start is None else datetime.fromisoformat(start).astimezone(UTC),
        **{name: row.get(name) for name in GROUPS},
        **{name: row[name] for name in COUNTS},
    )
