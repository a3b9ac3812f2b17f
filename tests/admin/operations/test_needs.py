"""`GET /needs`: what an operator has to look at; each kind comes, names its tenant, and goes when it is mended."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from sqlalchemy import event, insert, select, update

from loraplex.control.audit.recorder import GUARD, Actor, record
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Adapter, AdapterVersion, ApiKey, Release
from loraplex.control.release_types import ReleasePlan, ReleaseTarget, ShadowPlan
from loraplex.engine.reports import EngineStats
from loraplex.lifecycle.release_guard.guard import Guard
from loraplex.lifecycle.releases.rounds import Rounds
from loraplex.serving.errors import EngineUnavailable
from support.control.plane import ControlPlane
from support.http.admin_plane import AdminPlane, admin_client
from support.releases.watched import GUARD as RULES
from support.releases.watched import Watched

DAY_S = 86_400.0


@pytest.fixture
def watched(plane: AdminPlane) -> Watched:
    rules = SimpleNamespace(database=plane.database, releases=plane.services.releases)
    return Watched(cast(ControlPlane, rules))


def begun(watched: Watched, *, days: float, steps: list[int] | None = None, sticky: Any = "none") -> None:
    """A release of v2 that began `days` ago, with a guard, and `steps` by their seconds."""
    schedule = None if steps is None else [
        {"weight": 10 * (number + 1), "for_seconds": seconds} for number, seconds in enumerate(steps)
    ]  # fmt: skip
    watched.put(ReleasePlan(guard=RULES, schedule=schedule), v1=90, v2=10, sticky=sticky)
    with watched.plane.database.write() as session:
        session.execute(update(ReleaseRun).values(since=ReleaseRun.since - days * DAY_S))
    watched.began -= days * DAY_S


def looked_now(watched: Watched, server: Rounds) -> None:
    """Let the server look at the time that the database has."""
    watched.round(server, after=time.time() - watched.now())


async def needs(admin: httpx.AsyncClient) -> dict[str, Any]:
    answer = await admin.get("/needs")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def only(admin: httpx.AsyncClient, kind: str) -> dict[str, Any]:
    """The one row of a kind."""
    (row,) = (await needs(admin))[kind]["data"]
    return cast(dict[str, Any], row)


async def test_nothing_needs_anybody(admin: httpx.AsyncClient) -> None:
    found = await needs(admin)
    assert found.pop("unread_releases") == 0
    disks_found = found.pop("disks")
    assert (disks_found["data"], disks_found["prefixes_off"]) == ([], 0)
    assert {kind: (part["data"], part["total"]) for kind, part in found.items()} == dict.fromkeys(
        found, ([], 0)
    )


async def test_a_release_under_way(watched: Watched, admin: httpx.AsyncClient) -> None:
    begun(watched, days=0.1, steps=[36_000, 36_000])
    server = watched.server()
    watched.round(server)
    for _ in range(2):
        watched.ended(1, 10)
        watched.ended(2, 2)
        watched.round(server, after=DAY_S / 20)
    looked_now(watched, server)
    row = await only(admin, "running")
    assert (row["tenant_id"], row["name"], row["version"]) == ("acme", "pirate", "v2")
    assert (row["share"], row["step"], row["steps"], row["unit"]) == (0.1, 0, 2, "request")
    assert (row["verdict"], row["requests"], row["obstacle"]) == ("hold", 4, None)
    assert row["needs"] > 0
    assert datetime.fromisoformat(row["likely_at"]) > datetime.now(UTC)
    assert (await needs(admin))["undecided"]["total"] == 0


async def test_a_guard_that_nobody_asks(watched: Watched, admin: httpx.AsyncClient) -> None:
    begun(watched, days=1)
    row = await only(admin, "undecided")
    assert (row["obstacle"], row["verdict"], row["needs"]) == ("not_looked", None, None)


async def test_a_guard_whose_looks_stop(
    watched: Watched, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another look that finds nothing new is enough, and one that fails is none."""
    begun(watched, days=8900 / DAY_S)
    server = watched.server()
    watched.ended(1, 40)
    watched.ended(2, 10)
    watched.round(server, after=8450)  # within the guard's ten minutes that go on now
    looked_at = datetime.fromtimestamp(watched.now(), UTC)
    row = await only(admin, "undecided")
    assert (row["obstacle"], row["likely_at"]) == ("not_looked", None)
    assert abs(datetime.fromisoformat(row["looked_at"]) - looked_at) < timedelta(seconds=1)
    with monkeypatch.context() as broken:
        broken.setattr(Guard, "observe", lambda *_: 1 / 0)
        looked_now(watched, server)
    assert (await only(admin, "undecided"))["looked_at"] == row["looked_at"]
    watched.round(server, after=5.0)
    row = await only(admin, "running")
    assert datetime.now(UTC) - datetime.fromisoformat(row["looked_at"]) < timedelta(minutes=1)


async def test_a_version_without_requests_and_then_with_some(
    watched: Watched, admin: httpx.AsyncClient
) -> None:
    begun(watched, days=0.1)
    server = watched.server()
    looked_now(watched, server)
    row = await only(admin, "undecided")
    assert (row["obstacle"], row["requests"], row["likely_at"]) == ("no_requests", 0, None)
    watched.ended(1, 40)
    watched.ended(2, 10)
    watched.round(server)
    found = await needs(admin)
    assert found["undecided"]["total"] == 0
    assert found["running"]["data"][0]["requests"] == 10


async def test_a_guard_for_which_too_little_comes(watched: Watched, admin: httpx.AsyncClient) -> None:
    begun(watched, days=20)
    server = watched.server()
    watched.round(server)
    watched.ended(1, 2)
    watched.ended(2, 1)
    watched.round(server, after=DAY_S)
    looked_now(watched, server)
    row = await only(admin, "undecided")
    assert row["obstacle"] == "too_slow"
    assert datetime.fromisoformat(row["likely_at"]) > datetime.now(UTC) + timedelta(days=2)


async def test_the_same_users_again_and_again(watched: Watched, admin: httpx.AsyncClient) -> None:
    begun(watched, days=1, sticky="user")
    server = watched.server()
    watched.ended(2, 2, users=1)
    watched.round(server)
    for _ in range(3):
        watched.ended(2, 2, users=1)
        watched.round(server, after=3600)
    looked_now(watched, server)
    row = await only(admin, "undecided")
    assert (row["obstacle"], row["unit"], row["likely_at"]) == ("no_progress", "user", None)


async def test_a_guard_that_holds_beyond_its_step(watched: Watched, admin: httpx.AsyncClient) -> None:
    begun(watched, days=0.5, steps=[60])
    server = watched.server()
    watched.round(server)
    for number in range(15):
        watched.ended(1, 20)
        watched.ended(2, 2)
        if number in (0, 1, 7, 13):
            watched.ended(2, 1, status="internal_error")
        watched.round(server)
    looked_now(watched, server)
    row = await only(admin, "undecided")
    assert (row["obstacle"], row["verdict"], row["needs"], row["likely_at"]) == (
        "not_passing",
        "hold",
        0,
        None,
    )
    assert row["advice"] == "error_rate looks worse: waits for more evidence"
    watched.plane.releases.put("acme", "pirate", [ReleaseTarget("v1", 100)])
    found = await needs(admin)
    assert (found["undecided"]["total"], found["running"]["total"]) == (0, 0)


async def test_a_schedule_without_a_guard_that_nobody_moves_on(
    watched: Watched, admin: httpx.AsyncClient
) -> None:
    schedule = [{"weight": 10, "for_seconds": 60}]
    watched.put(ReleasePlan(schedule=schedule), v1=90, v2=10)
    row = await only(admin, "running")
    assert (row["verdict"], row["needs"], row["obstacle"]) == (None, None, None)
    assert row["likely_at"] is not None
    with watched.plane.database.write() as session:
        session.execute(update(ReleaseRun).values(since=ReleaseRun.since - DAY_S))
    assert (await only(admin, "undecided"))["obstacle"] == "not_looked"


async def test_a_shadow(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    targets = [ReleaseTarget("v1", 100)]
    plane.services.releases.put("acme", "pirate", targets, plan=ReleasePlan(shadow=ShadowPlan("v3", 0.25)))
    row = await only(admin, "shadows")
    assert (row["tenant_id"], row["name"], row["version"], row["share"]) == ("acme", "pirate", "v3", 0.25)
    assert row["samples"] == 0
    plane.services.releases.put("acme", "pirate", targets)
    assert (await needs(admin))["shadows"]["total"] == 0


def make_key(
    plane: AdminPlane, tenant: str, name: str, *, ends: float, used: float | None = 0.0, made: float = 30.0
) -> str:
    """A key's id. It ends `ends` days from now, was used `used` days ago, and was made `made` days ago."""
    key = plane.services.keys.create(tenant, name=name)[0].id
    now = datetime.now(UTC)
    with plane.database.write() as session:
        row = session.get_one(ApiKey, key)
        row.created_at = now - timedelta(days=made)
        row.expires_at = now + timedelta(days=ends)
        row.last_used_at = None if used is None else now - timedelta(days=used)
    return key


async def test_keys_in_use_that_end(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    make_key(plane, "acme", "later", ends=8)
    make_key(plane, "acme", "unused", ends=1, used=None)
    make_key(plane, "acme", "idle", ends=1, used=8)
    make_key(plane, "acme", "long-gone", ends=-1.5)
    make_key(plane, "acme", "of-a-day", ends=0.5, made=0.5)
    make_key(plane, "acme", "of-a-week", ends=1, made=6)
    plane.services.keys.revoke("acme", make_key(plane, "acme", "revoked", ends=1))
    assert (await needs(admin))["ending_keys"] == {"data": [], "total": 0}
    make_key(plane, "rival", "soon", ends=6.9)
    ids = [make_key(plane, "acme", f"key-{number}", ends=number - 0.5) for number in range(5)]
    found = (await needs(admin))["ending_keys"]
    assert [(row["tenant_id"], row["count"]) for row in found["data"]] == [("acme", 5), ("rival", 1)]
    assert [key["id"] for key in found["data"][0]["keys"]] == ids[1:4]
    assert [key["name"] for key in found["data"][0]["keys"]] == ["key-1", "key-2", "key-3"]
    assert found["total"] == 2
    later = datetime.now(UTC) + timedelta(days=30)
    for key in ids:
        plane.services.keys.update("acme", key, {"expires_at": later})
    found = (await needs(admin))["ending_keys"]
    assert [row["tenant_id"] for row in found["data"]] == ["rival"]
    gone = [make_key(plane, "acme", "gone", ends=-0.5) for _ in range(2)]
    found = (await needs(admin))["ending_keys"]
    assert [row["tenant_id"] for row in found["data"]] == ["rival", "acme"], "those that ended are last"
    assert {key["id"] for key in found["data"][1]["keys"]} == set(gone)
    plane.services.tenants.update("rival", {"suspended": True})
    found = (await needs(admin))["ending_keys"]
    assert ([row["tenant_id"] for row in found["data"]], found["total"]) == (["acme"], 1)


async def test_adapters_that_are_loaded_again_and_again(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    with plane.database.read() as session:
        rows = session.execute(select(AdapterVersion.number, AdapterVersion.digest)).all()
    digests = {row.number: row.digest for row in rows}
    reloads = {"copy": {digests[1]: 12, digests[2]: 40, "0" * 64: 99}, "disk": {digests[1]: 50}}
    plane.engine.engine_stats = EngineStats(reloads=reloads)
    found = (await needs(admin))["thrashing"]
    shown = [(row["version"], row["loads"], row["copies"], row["pinned"]) for row in found["data"]]
    assert shown == [("v1", 50, 12, False), ("v2", 0, 40, False)], "a version that was deleted is left out"
    plane.engine.engine_stats = EngineStats()
    assert (await needs(admin))["thrashing"]["total"] == 0


async def test_the_released_version_stands_for_all_with_its_files(
    plane: AdminPlane, admin: httpx.AsyncClient
) -> None:
    """acme/abc is the first by name and releases its second version."""
    for tenant, name, seed in (("acme", "abc", 9), ("acme", "abc", 4), ("acme", "def", 9), ("rival", "x", 9)):
        plane.make_adapter(name, tenant, seed=seed)
    digest = plane.services.catalog.get_version("rival", "x", "v1").digest
    plane.services.releases.put("acme", "abc", [ReleaseTarget("v2", 100)])
    plane.services.releases.put("acme", "def", [ReleaseTarget("v1", 100)])
    with plane.database.write() as session:
        session.execute(update(AdapterVersion).where(AdapterVersion.name == "x").values(pinned=True))
    plane.engine.engine_stats = EngineStats(reloads={"copy": {digest: 20}})
    row = await only(admin, "thrashing")
    assert (row["tenant_id"], row["name"], row["version"]) == ("acme", "def", "v1")
    assert (row["pinned"], row["others"], row["elsewhere"]) == (True, 1, 1)


async def test_an_engine_that_is_away(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> EngineStats:
        raise EngineUnavailable("it is being restarted")

    monkeypatch.setattr(plane.engine, "stats", away)
    assert (await needs(admin))["thrashing"]["total"] == 0


def refuse(plane: AdminPlane, by: Actor, tenant: str, names: list[str]) -> None:
    """Uploads to these adapters of a tenant, refused."""
    with plane.database.write() as session:
        for name in names:
            target = f"tenants/{tenant}/adapters/{name}/versions"
            refusal = {"outcome": "refused", "code": "unsafe_file"}
            record(session, by, "version.upload", target, tenant_id=tenant, **cast(Any, refusal))


async def test_a_tenant_with_many_refusals_hides_no_older_one(
    plane: AdminPlane, admin: httpx.AsyncClient
) -> None:
    """More rows than a page of the audit log has."""
    refuse(plane, Actor("key", "rival", "k2"), "rival", ["quiet"])
    refuse(plane, Actor("key", "acme", "k1"), "rival", ["call-this-number"])
    refuse(plane, Actor("key", "acme", "k1"), "acme", [f"n{number % 300}" for number in range(600)])
    found = (await needs(admin))["refused_uploads"]
    names = [f"{row['tenant_id']}/{row['name']}" for row in found["data"]]
    assert names[:2] == ["acme/n299", "rival/quiet"], "the newest of each tenant first"
    assert len(names) == len(set(names)) == 20
    assert {row["code"] for row in found["data"]} == {"unsafe_file"}
    assert (found["total"], found["more"]) == (301, [{"tenant_id": "acme", "count": 281}])


async def test_an_upload_to_a_series_is_one_to_its_name(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    refuse(plane, Actor("admin"), "acme", ["pirate", "pirate/series"])
    row = await only(admin, "refused_uploads")
    assert (row["name"], row["version"], row["code"]) == ("pirate", None, "unsafe_file")


async def test_rollbacks_and_failed_checks(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    place = "tenants/acme/adapters/pirate"
    with plane.database.write() as session:
        for _ in range(2):
            record(session, GUARD, "release.rolled_back", f"{place}/release", tenant_id="acme")
        check = f"{place}/versions/v2"
        record(session, Actor("admin"), "version.check", check, tenant_id="acme")
        refusal = {"outcome": "refused", "code": "numerical_mismatch"}
        record(session, Actor("admin"), "version.check", check, tenant_id="acme", **cast(Any, refusal))
    row = await only(admin, "rolled_back")
    assert (row["tenant_id"], row["name"], row["version"], row["code"]) == ("acme", "pirate", None, None)
    row = await only(admin, "failed_checks")
    assert (row["name"], row["version"], row["code"]) == ("pirate", "v2", "numerical_mismatch")


def fill(plane: AdminPlane, numbers: range) -> None:
    """Adapters of 40 tenants with 20 versions each; half of their releases run, the others have a shadow."""
    names = [(f"t{number % 80 // 2}", f"a{number}") for number in numbers]
    now = datetime.now(UTC)
    known = {tenant.id for tenant in plane.services.tenants.list().items}
    for tenant in {tenant for tenant, _ in names} - known:
        plane.make_tenant(tenant)
    with plane.database.write() as session:
        version = session.scalars(select(AdapterVersion).limit(1)).one()
        release = session.scalars(select(Release).limit(1)).one()

        def copied(row: Any, **changes: Any) -> dict[str, Any]:
            return {column.name: getattr(row, column.name) for column in row.__table__.columns} | changes

        session.execute(
            insert(Adapter),
            [{"tenant_id": t, "name": n, "last_number": 20, "created_at": now} for t, n in names],
        )
        versions = [
            copied(version, tenant_id=t, name=n, number=number) for t, n in names for number in range(1, 21)
        ]
        session.execute(insert(AdapterVersion), versions)
        shadow = {"version": "v3", "sample": 0.1, "keep_texts": False}
        releases = [
            copied(
                release, tenant_id=t, name=n, revision=revision, guard=None if place % 2 else RULES,
                shadow=shadow if place % 2 else None,
                targets=[{"version": "v1", "weight": 90}, {"version": "v2", "weight": 10}],
            )
            for place, (t, n) in enumerate(names) for revision in (1, 2)
        ]  # fmt: skip
        session.execute(insert(Release), releases)
        runs = [
            {
                "tenant_id": t, "name": n, "began": 2, "revision": 2, "status": "running", "step": 0,
                "since": now.timestamp() - DAY_S, "control": 1, "candidate": 2,
            }
            for t, n in names[::2]
        ]  # fmt: skip
        session.execute(insert(ReleaseRun), runs)


async def test_many_adapters_cost_no_further_statement(plane: AdminPlane, admin: httpx.AsyncClient) -> None:
    """500 adapters of 40 tenants with 10,000 versions."""
    digest = plane.services.catalog.get_version("acme", "pirate", "v1").digest
    plane.engine.engine_stats = EngineStats(reloads={"copy": {digest: 20}})
    counts = []
    for first, adapters in ((0, 2), (2, 500)):
        fill(plane, range(first, adapters))
        told: list[str] = []

        def note(_connection: Any, _cursor: Any, statement: str, *_: Any, told: list[str] = told) -> None:
            told.append(statement)

        event.listen(plane.database._reporter, "before_cursor_execute", note)
        began = time.monotonic()
        answer = await admin.get("/needs")
        print(f"{adapters} adapters: {time.monotonic() - began:.3f} s, {len(answer.content)} bytes")
        event.remove(plane.database._reporter, "before_cursor_execute", note)
        counts.append(len([one for one in told if one.startswith("SELECT")]))
    found = answer.json()
    assert (found["undecided"]["total"], found["shadows"]["total"]) == (250, 250)
    assert len({row["tenant_id"] for row in found["undecided"]["data"]}) == 20, "one of each tenant"
    assert len(answer.content) < 32_000
    assert counts == [10, 10]


async def test_releases_beyond_those_that_are_read_are_not_said_to_go_on(
    plane: AdminPlane, admin: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loraplex.lifecycle.needs.releases.MOST_READ", 3)
    fill(plane, range(10))
    found = await needs(admin)
    totals = found["undecided"]["total"], found["running"]["total"], found["unread_releases"]
    assert totals == (3, 0, 2)


async def test_it_is_the_operators(plane: AdminPlane) -> None:
    async with admin_client(plane.app, plane.make_key("acme", "adapters:read", "usage:read")) as client:
        assert (await client.get("/needs")).status_code == 403
    async with admin_client(plane.tenant_app) as client:
        assert (await client.get("/needs")).status_code in (401, 404)
