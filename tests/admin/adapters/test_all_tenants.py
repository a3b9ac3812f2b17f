"""`GET /adapters`: adapters of all tenants with what was asked of them, filtered, sorted and counted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import event, insert, select, update

from loraplex.adapters.cache.residency import CacheEntry
from loraplex.control.db.tables import Adapter, AdapterVersion, Release, Usage
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.usage.overview import OverviewFilter, Overviews
from support.control.usage import ended
from support.http.admin_plane import AdminPlane, admin_client, assert_problem

AGO = timedelta(minutes=5)


def ask(plane: AdminPlane, tenant: str, name: str, *firsts: float | None, **told: Any) -> None:
    """One ended request for each time to a first token."""
    rows = [
        ended(
            at=told.get("at", datetime.now(UTC) - AGO),
            tenant_id=tenant,
            adapter=name,
            prompt_tokens=3,
            completion_tokens=4,
            first_token_s=first,
            status=told.get("status", "stop"),
        )
        for first in firsts
    ]
    with plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])


@pytest.fixture
def several(plane: AdminPlane) -> AdminPlane:
    """acme: billing (two versions, v1 released and pinned), support (corrupt). rival: support (of another base)."""
    for tenant in ("acme", "rival"):
        plane.make_tenant(tenant)
        plane.make_adapter("support", tenant, seed=1)
    plane.make_adapter("billing", seed=2)
    plane.make_adapter("billing", seed=3)
    plane.services.catalog.set_pin("acme", "billing", "v1", True)
    plane.services.releases.put("acme", "billing", [ReleaseTarget("v1", 100)])
    with plane.database.write() as session:
        version = AdapterVersion
        session.execute(
            update(version)
            .where(version.tenant_id == "rival")
            .values(base_fingerprint="f" * 64, state="incompatible")
        )
        own = (version.tenant_id == "acme") & (version.name == "support")
        session.execute(update(version).where(own).values(state="corrupt"))
    ask(plane, "acme", "billing", 0.1, 0.3, 0.2, 0.5)
    ask(plane, "rival", "support", 0.9, 0.7)
    ask(plane, "rival", "support", None, None, status="internal_error")
    ask(plane, "rival", "support", 0.1, at=datetime.now(UTC) - timedelta(hours=3))
    ask(plane, "acme", "(base)", 0.1)
    return plane


async def names(admin: httpx.AsyncClient, **query: Any) -> list[str]:
    """All pages of the list, two adapters at a time."""
    found: list[str] = []
    cursor = None
    while True:
        chosen = query | {"limit": 2} | ({"cursor": cursor} if cursor else {})
        answer = await admin.get("/adapters", params=chosen)
        assert answer.status_code == 200, answer.text
        found += [f"{row['tenant']}/{row['name']}" for row in answer.json()["data"]]
        if not (cursor := answer.json()["next_cursor"]):
            return found


async def test_a_row_has_the_version_the_release_and_what_was_asked(
    several: AdminPlane, admin: httpx.AsyncClient
) -> None:
    newest = several.services.catalog.get_version("acme", "billing", "v2")
    several.engine.entries = [CacheEntry(newest.ref(), "hot", device_bytes=10, host_bytes=5)]
    page = (await admin.get("/adapters", params={"hours": 1})).json()
    billing, support, other = page["data"]
    sizes = sum(several.services.catalog.get_version("acme", "billing", v).bytes for v in ("v1", "v2"))
    assert datetime.fromisoformat(billing.pop("created_at")) <= datetime.now(UTC)
    assert datetime.fromisoformat(billing.pop("last_used_at")) < datetime.now(UTC) - AGO / 2
    assert billing == {
        "tenant": "acme",
        "tags": [],
        "name": "billing",
        "version": "v2",
        "state": "ready",
        "compatible": True,
        "num_versions": 2,
        "bytes": sizes,
        "pinned": 1,
        "released": [{"version": "v1", "weight": 100, "state": "ready"}],
        "run": None,
        "requests": 4,
        "errors": 0,
        "tokens": 28,
        "first_token_seconds": 0.2,
        "residency": ["device", "host", "disk"],
    }
    assert (support["state"], support["requests"], support["last_used_at"]) == ("corrupt", 0, None)
    assert (support["first_token_seconds"], support["residency"]) == (None, ["disk"])
    assert (other["compatible"], other["requests"], other["errors"]) == (False, 4, 2)
    assert other["first_token_seconds"] == 0.7
    everything = sizes + support["bytes"] + other["bytes"]
    states = {"corrupt": 1, "incompatible": 1, "ready": 1}
    assert page["totals"] == {
        "adapters": 3, "states": states, "bytes": everything, "requests": 8, "errors": 2, "tokens": 56,
    }  # fmt: skip
    wider = (await admin.get("/adapters", params={"hours": 4})).json()["data"][2]
    assert (wider["requests"], wider["first_token_seconds"]) == (5, 0.7)


@pytest.mark.parametrize(
    ("query", "listed"),
    [
        ({"tenant": "rival"}, ["rival/support"]),
        ({"tenant": "nobody"}, []),
        ({"state": "corrupt"}, ["acme/support"]),
        ({"base": "other"}, ["rival/support"]),
        ({"base": "served", "search": "supp"}, ["acme/support"]),
        ({"search": "_"}, []),
        ({"min_errors": 2}, ["rival/support"]),
        ({"min_errors": 3}, []),
        ({"min_error_rate": 0.5}, ["rival/support"]),
        ({"min_error_rate": 0.51}, []),
        ({"min_errors": 1, "hours": 0}, []),
        ({"release": "running"}, []),
        ({"sort": "requests", "order": "desc"}, ["rival/support", "acme/billing", "acme/support"]),
        ({"sort": "errors"}, ["acme/billing", "acme/support", "rival/support"]),
        ({"sort": "tokens", "order": "desc", "hours": 1}, ["rival/support", "acme/billing", "acme/support"]),
        ({"sort": "first_token", "order": "desc"}, ["rival/support", "acme/billing", "acme/support"]),
        ({"sort": "last_used"}, ["acme/support", "acme/billing", "rival/support"]),
        ({"sort": "bytes", "order": "desc"}, ["acme/billing", "rival/support", "acme/support"]),
        ({"sort": "created"}, ["acme/support", "rival/support", "acme/billing"]),
        ({"order": "desc"}, ["rival/support", "acme/support", "acme/billing"]),
    ],
)
async def test_filters_and_orders(
    several: AdminPlane, admin: httpx.AsyncClient, query: dict[str, Any], listed: list[str]
) -> None:
    assert await names(admin, **query) == listed
    totals = (await admin.get("/adapters", params=query)).json()["totals"]
    assert totals["adapters"] == len(listed), "of all pages"


async def test_names_without_a_release_and_without_a_living_version(
    several: AdminPlane, admin: httpx.AsyncClient
) -> None:
    """A name that was deleted has a release without targets, which is none."""
    several.services.catalog.delete_adapter("acme", "billing")
    assert await names(admin) == ["acme/support", "rival/support"]
    assert await names(admin, release="released") == ["acme/support", "rival/support"]
    with several.database.write() as session:
        session.execute(update(Release).where(Release.tenant_id == "rival").values(targets=[]))
    assert await names(admin, release="none") == ["rival/support"]
    assert await names(admin, release="released") == ["acme/support"]


async def test_a_damaged_version_that_takes_traffic_is_found_behind_its_newer_ones(
    several: AdminPlane, admin: httpx.AsyncClient
) -> None:
    """billing: v1 is released, v2 is not; acme/support and rival/support have a newest version like that."""
    version = AdapterVersion
    own = (version.name == "billing") & (version.number == 1)
    with several.database.write() as session:
        session.execute(update(version).where(own).values(state="corrupt", base_fingerprint="f" * 64))
    page = (await admin.get("/adapters", params={"state": "corrupt"})).json()
    billing, support = page["data"]
    assert (billing["name"], billing["version"], billing["state"]) == ("billing", "v2", "ready")
    assert billing["released"] == [{"version": "v1", "weight": 100, "state": "corrupt"}]
    assert (support["name"], billing["num_versions"], billing["requests"]) == ("support", 2, 4)
    assert page["totals"]["states"] == {"corrupt": 1, "ready": 1}
    assert await names(admin, base="other") == ["acme/billing", "rival/support"]
    assert await names(admin, state="corrupt", base="served") == ["acme/support"], "one version is both"
    several.services.releases.put("acme", "billing", [ReleaseTarget("v2", 100)])
    assert await names(admin, state="corrupt") == ["acme/support"]


async def test_the_number_of_statements_does_not_grow(several: AdminPlane, admin: httpx.AsyncClient) -> None:
    counts = []
    for more in (0, 20):
        for number in range(more):
            several.make_adapter(f"more-{number}", seed=5)
        told: list[str] = []

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any, told: list[str] = told) -> None:
            told.append(statement)

        event.listen(several.database._reporter, "before_cursor_execute", note)
        answer = await admin.get("/adapters", params={"limit": 500})
        event.remove(several.database._reporter, "before_cursor_execute", note)
        assert len(answer.json()["data"]) == 3 + more
        counts.append(len([one for one in told if one.startswith("SELECT")]))
    assert counts == [6, 5], "rows of the ledger are read once"


async def test_no_hours_are_nothing_asked_and_the_ledger_is_not_read(
    several: AdminPlane, admin: httpx.AsyncClient
) -> None:
    told: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        told.append(statement)

    event.listen(several.database._reporter, "before_cursor_execute", note)
    for sort in ("name", "errors", "first_token", "last_used"):
        page = (await admin.get("/adapters", params={"hours": 0, "sort": sort})).json()
        assert {(row["requests"], row["first_token_seconds"]) for row in page["data"]} == {(0, None)}
        assert (page["totals"]["adapters"], page["totals"]["requests"]) == (3, 0)
    event.remove(several.database._reporter, "before_cursor_execute", note)
    assert told
    assert not [one for one in told if "FROM usage" in one]


def test_the_work_of_the_database_grows_with_the_adapters_alone(several: AdminPlane) -> None:
    """SQLite's instructions, in thousands: four times the adapters, and not sixteen times the work."""
    with several.database.write() as session:
        first = session.get_one(AdapterVersion, ("acme", "billing", 1))
        release = session.scalars(select(Release).limit(1)).one()
        version_row, release_row = (
            {column.name: getattr(row, column.name) for column in row.__table__.columns}
            for row in (first, release)
        )
    work = []
    for number in (1000, 4000):
        names = [f"a{number}-{place}" for place in range(number - (1000 if work else 0))]
        with several.database.write() as session:
            own = [{"tenant_id": "acme", "name": name} for name in names]
            made = {"last_number": 1, "created_at": first.created_at}
            session.execute(insert(Adapter), [made | one for one in own])
            session.execute(insert(AdapterVersion), [version_row | one for one in own])
            session.execute(insert(Release), [release_row | one for one in own])
            used = [ended(at=datetime.now(UTC), tenant_id="acme", adapter=name) for name in names]
            session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in used])
        steps: list[None] = []

        def count(connection: Any, *_: Any, steps: list[None] = steps) -> None:
            connection.connection.driver_connection.set_progress_handler(lambda: steps.append(None), 1000)

        event.listen(several.database._reporter, "before_cursor_execute", count)
        read = Overviews(several.database, several.services.catalog.base.fingerprint).read
        found = read(OverviewFilter(), since=datetime.now(UTC) - timedelta(hours=1), sort="first_token")
        event.remove(several.database._reporter, "before_cursor_execute", count)
        assert found.totals.states["ready"] == number + 1
        work.append(len(steps))
    assert work[1] < 6 * work[0], work


@pytest.mark.parametrize(
    "query",
    [
        "state=deleted",
        "sort=digest",
        "hours=25",
        "hours=-1",
        "min_errors=-1",
        "min_error_rate=1.1",
        "min_error_rate=nan",
        "release=x",
        "base=f",
        "search=%25",
        "tenant=A",
        "limit=501",
    ],
)
async def test_what_is_no_filter_is_refused(admin: httpx.AsyncClient, query: str) -> None:
    assert (await admin.get(f"/adapters?{query}")).status_code == 400


@pytest.mark.parametrize("sort", ["name", "requests", "first_token", "last_used"])
@pytest.mark.parametrize(
    "cursor", ["e30=", "W10=", "WyJhIiwiYiIsImMiXQ==", "WzEsIlx1MDAwMCIsImEiXQ==", "WzFlOTk5LCJhIiwiYiJd"]
)
async def test_cursors_of_other_lists_are_refused(admin: httpx.AsyncClient, sort: str, cursor: str) -> None:
    """{}, [], ["a","b","c"], [1,NUL,"a"], [1e999,"a","b"]."""
    assert_problem(await admin.get(f"/adapters?sort={sort}&cursor={cursor}"), 400, "invalid_cursor")


async def test_it_is_the_operators_and_tells_while_the_engine_is_away(several: AdminPlane) -> None:
    async with admin_client(several.app, several.make_key("acme", "adapters:read")) as client:
        assert (await client.get("/adapters")).status_code == 403
