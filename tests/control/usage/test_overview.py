"""The list of all adapters on both databases: filters, orders, pages and medians."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import event, insert, update

from loraplex.control.db.tables import AdapterVersion, Release, Usage
from loraplex.control.usage.overview import OverviewFilter, Overviews, Sort, Summary
from loraplex.control.usage.overview_figures import SPAN, AskedOfAdapters, Sums
from loraplex.control.usage.records import Ended
from support.control.plane import ControlPlane
from support.control.usage import ended

NOW = datetime.now(UTC)
SINCE = NOW - timedelta(hours=1)


@pytest.fixture
def overviews(plane: ControlPlane) -> Overviews:
    """acme/billing and rival/support have requests; acme/support has none, is corrupt and has no release."""
    for tenant, name in (("acme", "billing"), ("acme", "support"), ("rival", "support")):
        plane.add(tenant, name)
    asked = [("acme", "billing", first, "stop") for first in (0.4, 0.1, 0.3, 0.2)]
    asked += [("rival", "support", first, "internal_error") for first in (0.9, None, 0.7, 0.8, None)]
    rows = [
        ended(at=NOW, tenant_id=tenant, adapter=name, first_token_s=first, status=status, completion_tokens=1)
        for tenant, name, first, status in asked
    ]
    rows.append(ended(at=NOW - timedelta(hours=2), tenant_id="acme", adapter="support"))
    with plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
        own = [(table.tenant_id == "acme") & (table.name == "support") for table in (AdapterVersion, Release)]
        session.execute(update(AdapterVersion).where(own[0]).values(state="corrupt"))
        session.execute(update(Release).where(own[1]).values(targets=[]))
    plane.catalog.set_tags("acme", "support", ["eu", "beta"])
    plane.catalog.set_tags("rival", "support", ["eu"])
    return Overviews(plane.database, plane.catalog.base.fingerprint)


def pages(overviews: Overviews, sort: Sort, descending: bool) -> list[Summary]:
    """All pages of one adapter each."""
    found: list[Summary] = []
    cursor = None
    while True:
        page = overviews.read(
            OverviewFilter(), since=SINCE, sort=sort, descending=descending, limit=1, cursor=cursor
        ).page
        found += page.items
        if (cursor := page.next_cursor) is None:
            return found


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("name", ["acme/billing", "acme/support", "rival/support"]),
        ("requests", ["acme/support", "acme/billing", "rival/support"]),
        ("first_token", ["acme/support", "acme/billing", "rival/support"]),
        ("last_used", ["acme/support", "acme/billing", "rival/support"]),
        ("errors", ["acme/billing", "acme/support", "rival/support"]),
    ],
)
def test_each_order_goes_through_all_pages_both_ways(
    overviews: Overviews, sort: Sort, names: list[str]
) -> None:
    for descending in (False, True):
        rows = pages(overviews, sort, descending)
        assert [f"{row.tenant_id}/{row.name}" for row in rows] == names[:: -1 if descending else 1]
        assert {(row.tenant_id, row.first_token_s) for row in rows if row.requests} == {
            ("acme", 0.2),
            ("rival", 0.8),
        }, "the lower of two in the middle"


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (OverviewFilter(tenant="acme", state="ready"), ["acme/billing"]),
        (OverviewFilter(search="supp"), ["acme/support", "rival/support"]),
        (OverviewFilter(release="none"), ["acme/support"]),
        (OverviewFilter(release="released"), ["acme/billing", "rival/support"]),
        (OverviewFilter(release="running"), []),
        (OverviewFilter(base="other"), []),
        (OverviewFilter(tag="eu"), ["acme/support", "rival/support"]),
        (OverviewFilter(tag="eu", tenant="acme"), ["acme/support"]),
        (OverviewFilter(tag="beta", state="ready"), []),
        (OverviewFilter(tag="bet"), []),
    ],
)
def test_the_sums_are_of_what_the_filter_lets_through(
    overviews: Overviews, chosen: OverviewFilter, names: list[str]
) -> None:
    found = overviews.read(chosen, since=SINCE)
    assert [f"{row.tenant_id}/{row.name}" for row in found.page.items] == names
    assert sum(found.totals.states.values()) == len(names)
    assert found.totals.requests == sum(row.requests for row in found.page.items)
    assert found.totals.errors == sum(row.errors for row in found.page.items)
    assert found.totals.bytes == sum(row.bytes for row in found.page.items)


def write(plane: ControlPlane, *rows: Ended) -> None:
    with plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])


def used(at: datetime) -> Any:
    return ended(at=at, tenant_id="acme", adapter="support", completion_tokens=1)


def figures(plane: ControlPlane, asked: AskedOfAdapters, since: datetime) -> tuple[object, object, object]:
    with plane.database.read(report=True) as session:
        found = asked.since(session, since)
        return found.sums(), found.medians(), found.medians({("acme", "support")})


def test_what_is_kept_equals_what_the_database_sums_up(plane: ControlPlane) -> None:
    """Requests of a day, some just before and after a span's end, and some that come late or from a clock ahead: each
    is in the next answer."""
    rng = random.Random(3)
    now = datetime.now(UTC)
    whole = now - (now - datetime(1970, 1, 1, tzinfo=UTC)) % SPAN
    edges = [whole - SPAN, whole - SPAN - timedelta(microseconds=1), whole - timedelta(microseconds=1), whole]
    kept, summed = (AskedOfAdapters(plane.database, max_rows=rows) for rows in (1000, 0))
    small = AskedOfAdapters(plane.database, max_rows=120)
    for late in range(4):
        times = [now - timedelta(seconds=rng.random() * 86_000) for _ in range(30)]
        times += [*edges, now - timedelta(hours=1), now + timedelta(minutes=5)]
        write(plane, *(
            ended(at=at, tenant_id=rng.choice(["acme", "rival"]), adapter=rng.choice(["support", "billing"]),
                  status=rng.choice(["stop", "internal_error", "adapter_unavailable", "cancelled"]),
                  first_token_s=rng.choice([None, rng.random(), 0.1]), prompt_tokens=rng.randrange(9),
                  completion_tokens=2**40 + late)
            for at in times
        ))  # fmt: skip
        for hours in (1, 24, 6, 1):
            since = now - timedelta(hours=hours)
            expected = figures(plane, summed, since)
            assert figures(plane, kept, since) == expected
            assert figures(plane, small, since) == expected
            assert expected[0]


def test_rows_that_did_not_change_are_read_once(plane: ControlPlane) -> None:
    """Rows that are read leave the database for the first answer alone, and a late one brings those of its span."""
    asked = AskedOfAdapters(plane.database)
    now = datetime.now(UTC)
    write(plane, *(used(now - timedelta(minutes=9 * number)) for number in range(60)))
    read: list[int] = []

    def note(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if "ORDER BY usage.at" in statement:
            read.append(1)

    event.listen(plane.database._reporter, "after_cursor_execute", note)
    since = now - timedelta(hours=12)
    for expected in (1, 1):
        figures(plane, asked, since)
        assert len(read) == expected
    write(plane, used(now - timedelta(hours=7)), used(now - timedelta(hours=9)))
    sums = figures(plane, asked, since)[0]
    assert len(read) == 3
    assert sums == {("acme", "support"): Sums(62, 0, 62 * 11, now)}


def test_a_span_that_has_ended_is_kept_once(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """While time goes on, the rows that are kept are those of the ledger: room for all of them is enough to read none
    again."""
    whole = datetime.now(UTC) - (datetime.now(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) % SPAN - 12 * SPAN
    read: list[int] = []

    def note(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if "ORDER BY usage.at" in statement:
            read.append(1)

    asked = AskedOfAdapters(plane.database, max_rows=24)
    for number in range(12):
        clock = Clock(whole + (number + 0.5) * SPAN)
        monkeypatch.setattr("loraplex.control.usage.overview_figures.datetime", clock)
        write(plane, *(used(clock.now(UTC)) for _ in range(2)))
        figures(plane, asked, whole)
    event.listen(plane.database._reporter, "after_cursor_execute", note)
    assert figures(plane, asked, whole)[0] == {("acme", "support"): Sums(24, 0, 24 * 11, whole + 11.5 * SPAN)}
    assert not read


class Clock:
    """Stands for `datetime` where only the time now is asked of it."""

    def __init__(self, at: datetime) -> None:
        self._at = at

    def now(self, _zone: object) -> datetime:
        return self._at
