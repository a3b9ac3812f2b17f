"""What `GET /usage` sums up: the database's sums are those of the rows, before and after days were rolled up."""

from __future__ import annotations

import asyncio
import base64
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, select

from loraplex.control.db.tables import Usage, UsageDay
from loraplex.control.errors import DatabaseUnavailable, InvalidValue
from loraplex.control.rules import InvalidCursor
from loraplex.control.usage.csv_text import csv_text
from loraplex.control.usage.records import BASE, Ended
from loraplex.control.usage.report import COUNTS, GROUPS, Bucket, Group, UsageReports, UsageSum
from loraplex.control.usage.roll_up import UsageRollUp
from support.control.plane import ControlPlane
from support.control.usage import ended, rows_of

START = datetime(2026, 1, 30, tzinfo=UTC)
END = datetime(2026, 2, 4, tzinfo=UTC)
EVER = {"start": datetime(2020, 1, 1, tzinfo=UTC), "end": datetime(2030, 1, 1, tzinfo=UTC)}


def some_rows(count: int, seed: int = 1) -> list[Ended]:
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        adapter = chance.choice((BASE, "json", "pirate"))
        rows.append(
            ended(
                at=START + timedelta(microseconds=chance.randrange(5 * 86_400 * 10**6)),
                tenant_id=chance.choice(("acme", "rival", "acme-2")),
                key_id=chance.choice(("k1", "k2")),
                adapter=adapter,
                version=0 if adapter == BASE else chance.choice((1, 2, 10)),
                status=chance.choice(("stop", "length", "cancelled")),
                prompt_tokens=chance.randrange(1000),
                cached_tokens=chance.randrange(10),
                completion_tokens=chance.randrange(2**33),
            )
        )
    # On the boundaries of the period: the first counts, the second does not.
    return [*rows, ended(at=START), ended(at=END)]


def put(plane: ControlPlane, rows: Sequence[Ended]) -> None:
    with plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])


def bucket_of(at: datetime, bucket: Bucket) -> datetime | None:
    changes = {"hour": {}, "day": {"hour": 0}, "month": {"hour": 0, "day": 1}}
    if bucket == "none":
        return None
    return at.replace(minute=0, second=0, microsecond=0, **changes[bucket])


def oracle(rows: Sequence[Ended], bucket: Bucket, group_by: Sequence[Group]) -> set[UsageSum]:
    sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * 4)
    for row in rows:
        values = {
            "tenant": row.tenant_id,
            "key": row.key_id,
            "adapter": row.adapter,
            "version": row.version,
            "status": row.status,
        }
        key = (bucket_of(row.at, bucket), *(values[name] if name in group_by else None for name in GROUPS))
        counts = (1, row.prompt_tokens, row.cached_tokens, row.completion_tokens)
        sums[key] = [total + count for total, count in zip(sums[key], counts, strict=True)]
    return {UsageSum(*key, *counts) for key, counts in sums.items()}


def everything(reports: UsageReports, limit: int = 500, **asked: Any) -> list[UsageSum]:
    found: list[UsageSum] = []
    cursor = None
    while True:
        page = reports.sums(**{"start": START, "end": END, **asked}, limit=limit, cursor=cursor)
        assert len(page.items) <= limit
        found += page.items
        cursor = page.next_cursor
        if cursor is None:
            return found


@pytest.mark.parametrize("bucket", ["hour", "day", "month", "none"])
@pytest.mark.parametrize("group_by", [(), ("tenant",), ("adapter", "version"), GROUPS])
def test_sums_are_those_of_the_rows(plane: ControlPlane, bucket: Bucket, group_by: tuple[Group, ...]) -> None:
    rows = some_rows(300)
    put(plane, rows)
    inside = [row for row in rows if START <= row.at < END]
    found = everything(UsageReports(plane.database), bucket=bucket, group_by=group_by)
    assert set(found) == oracle(inside, bucket, group_by)
    assert len(found) == len(set(found))
    assert [row.start for row in found] == sorted([row.start for row in found], key=str)


def test_sums_of_one_tenant(plane: ControlPlane) -> None:
    rows = some_rows(100)
    put(plane, rows)
    own = [row for row in rows if row.tenant_id == "acme" and row.at < END]
    found = everything(UsageReports(plane.database), tenant="acme", group_by=("tenant", "status"))
    assert set(found) == oracle(own, "day", ("tenant", "status"))


def test_pages_are_the_whole_each_group_once(plane: ControlPlane) -> None:
    put(plane, some_rows(200))
    reports = UsageReports(plane.database)
    asked: dict[str, Any] = {"bucket": "day", "group_by": GROUPS}
    whole = everything(reports, **asked)
    assert len(whole) > 60
    assert everything(reports, limit=7, **asked) == whole
    assert everything(reports, limit=1, bucket="none", group_by=("version",)) == everything(
        reports, bucket="none", group_by=("version",)
    )


def test_nothing_used_is_no_row_or_zeros(plane: ControlPlane) -> None:
    reports = UsageReports(plane.database)
    assert everything(reports) == []
    (total,) = everything(reports, bucket="none")
    assert [getattr(total, name) for name in COUNTS] == [0, 0, 0, 0]


def test_invalid_queries_are_refused(plane: ControlPlane) -> None:
    reports = UsageReports(plane.database)
    with pytest.raises(InvalidValue):
        reports.sums(start=END, end=START)
    put(plane, some_rows(50))
    page = reports.sums(start=START, end=END, group_by=("tenant",), limit=1)
    for group_by in ((), ("version",), ("tenant", "key")):
        with pytest.raises(InvalidCursor):
            reports.sums(start=START, end=END, group_by=group_by, cursor=page.next_cursor)
    with pytest.raises(InvalidCursor):
        reports.sums(start=START, end=END, cursor="bm8=")
    for place in ('["\\u0000"]', '["\\ud800"]', '["a", "b"]', "[1]", "[[]]", '"a"', "null"):
        with pytest.raises(InvalidCursor):
            cursor = base64.urlsafe_b64encode(place.encode()).decode()
            reports.sums(start=START, end=END, cursor=cursor)


# Rolling up.


def test_sums_stay_when_days_are_rolled_up(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that end within a day, and with rows that come late for a day that was rolled up."""
    monkeypatch.setattr("loraplex.control.usage.roll_up.CHUNK_ROWS", 40)
    rows, late = some_rows(300), some_rows(60, seed=2)
    put(plane, rows)
    roll_up = UsageRollUp(plane.database, 2, clock=lambda: END + timedelta(hours=5))
    chunks = []
    while done := roll_up.roll_some():
        chunks.append(done)
    put(plane, late)
    while roll_up.roll_some():
        pass
    rows += late
    horizon = END - timedelta(days=2)
    assert max(chunks) == 40
    assert len(chunks) > 3
    assert {row.id for row in rows_of(plane.database).values()} == {
        row.id for row in rows if row.at >= horizon
    }
    reports = UsageReports(plane.database)
    for bucket in ("day", "month", "none"):
        found = everything(reports, bucket=bucket, group_by=GROUPS)
        assert set(found) == oracle([row for row in rows if row.at < END], bucket, GROUPS)
        assert len(found) == len(set(found))


def test_retention_of_zero_keeps_all_rows(plane: ControlPlane) -> None:
    put(plane, some_rows(10))
    assert UsageRollUp(plane.database, 0).roll_some() == 0


@pytest.mark.parametrize("heard", [True, False])
def test_a_chunk_is_added_and_deleted_or_neither(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    rows = some_rows(50)
    put(plane, rows)
    write = plane.database.write

    @contextmanager
    def failing(**options: Any) -> Any:
        with write(**options) as session:
            yield session
            if heard:
                raise DatabaseUnavailable
        raise DatabaseUnavailable

    roll_up = UsageRollUp(plane.database, 1, clock=lambda: END + timedelta(days=30))
    with monkeypatch.context() as patch:
        patch.setattr(plane.database, "write", failing)
        with pytest.raises(DatabaseUnavailable):
            roll_up.roll_some()
    with plane.database.read() as session:
        assert (session.scalars(select(UsageDay)).first() is None) is heard
    while roll_up.roll_some():
        pass
    found = everything(UsageReports(plane.database), bucket="none", **EVER)
    assert set(found) == oracle(rows, "none", ())


async def test_rolling_up_goes_on_whatever_fails(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(plane, some_rows(50))
    roll_up = UsageRollUp(plane.database, 1, clock=lambda: END + timedelta(days=30))
    failures = [DatabaseUnavailable(), ValueError("what nobody foresaw")]
    roll_some = roll_up.roll_some

    def fails_at_first() -> int:
        if failures:
            raise failures.pop()
        return roll_some()

    monkeypatch.setattr(roll_up, "roll_some", fails_at_first)
    task = asyncio.create_task(roll_up.run(interval_s=0.01))
    async with asyncio.timeout(60):
        while rows_of(plane.database):
            await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_csv_harms_no_spreadsheet() -> None:
    text = csv_text(["a", "b"], [["=1+1", 3], ["@x", None], ['q"u,o', -4], ["(base)", "-"]])
    assert text == 'a,b\r\n\'=1+1,3\r\n\'@x,\r\n"q""u,o",-4\r\n(base),\'-\r\n'
