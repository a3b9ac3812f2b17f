"""The page of what an operator has to look at: each kind with its way there, and the sentence for none."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from datetime import UTC

import msgspec
import pytest
from playwright.sync_api import Route, expect
from sqlalchemy import insert, select, update

from loraplex.control.audit.recorder import GUARD, Actor, record
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Adapter, AdapterVersion, ApiKey, Usage
from loraplex.control.release_types import ReleasePlan, ReleaseTarget, ShadowPlan
from loraplex.engine.reports import EngineStats
from loraplex.lifecycle.releases.rounds import Rounds
from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
STATUSES = {"billing": ("stop", "internal_error"), "notes": ("stop", "rate_limit_exceeded")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        for seed, name in enumerate(("billing", "notes", "support")):
            running.plane.make_adapter(name, "acme", seed=seed)
        yield running
        running.settle()


def trouble(server: WholeServer) -> None:
    """acme/billing fails half of its requests, acme/notes only refuses; twenty others have more errors, of few of their
    requests. The released version of acme/support is damaged, the newest is not; it was rolled back. A version failed
    its check, an upload was refused, and of 25 adapters that the tenant may have 23 are there."""
    server.plane.make_adapter("support", "acme", seed=9)
    server.plane.services.releases.put("acme", "support", [ReleaseTarget("v1", 100)])
    at = datetime.datetime.now(UTC) - datetime.timedelta(minutes=2)
    rows = [
        ended(at=at, tenant_id="acme", adapter=name, status=status)
        for name, statuses in STATUSES.items()
        for status in statuses * 6
    ]
    busy = [f"busy-{number}" for number in range(20)]
    rows += [
        ended(at=at, tenant_id="acme", adapter=name, status="stop" if number % 25 else "internal_error")
        for name in busy
        for number in range(200)
    ]
    with server.plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
        session.execute(
            update(AdapterVersion)
            .where(AdapterVersion.name == "support", AdapterVersion.number == 1)
            .values(state="corrupt")
        )
        for table in (Adapter, AdapterVersion):
            row = session.scalars(select(table).where(table.name == "notes")).one()
            copied = {column.name: getattr(row, column.name) for column in row.__table__.columns}
            session.execute(insert(table), [copied | {"name": name} for name in busy])
        for _ in range(2):
            record(
                session,
                GUARD,
                "release.rolled_back",
                "tenants/acme/adapters/support/release",
                tenant_id="acme",
            )
        refusals = (
            ("version.check", "acme/adapters/notes/versions/v2", "numerical_mismatch"),
            (
                "version.upload",
                "acme/adapters/new/versions",
                "unsafe_file",
            ),
        )
        for action, place, code in refusals:
            for _ in range(2):
                record(
                    session,
                    Actor("admin"),
                    action,
                    f"tenants/{place}",
                    tenant_id="acme",
                    outcome="refused",
                    code=code,
                )
        record(
            session,
            Actor("admin"),
            "version.upload",
            "tenants/acme/adapters/notes/versions",
            tenant_id="acme",
        )
    server.plane.services.tenants.update(
        "acme", {"limits": {"max_adapters": 25, "max_adapter_bytes": 1 << 40}}
    )


def spend_budgets(route: Route) -> None:
    answer = route.fetch()
    page = answer.json()
    budget = {"limit": 1000, "left": 99, "spent": 901, "held": 0}
    page["data"] = [row | {"budget": budget} for row in page["data"]]
    route.fulfill(response=answer, body=json.dumps(page))


def many_tenants(route: Route) -> None:
    """Page after page without an end, of tenants without a budget."""
    none = {"budget": None, "limits": {}, "stored": {"adapters": None, "bytes": None}}
    rows = [{"id": f"t{number}", **none} for number in range(500)]
    body = {"data": rows, "next_cursor": "more"}
    route.fulfill(status=200, content_type="application/json", body=json.dumps(body))


def test_nothing_and_then_everything(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    screen["nav-needs"].click()
    expect(screen["empty"]).to_have_text("Nothing needs you now.")
    tenants = "**/admin/v1/tenants?*"
    screen.page.route(tenants, many_tenants)
    screen.go("now").go("needs")
    expect(screen["needs-cut"]).to_contain_text(
        "Budgets and quotas of the first 2,000 tenants were looked at."
    )
    expect(screen["empty"]).to_have_text("Nothing else that was looked at needs you now.")
    screen.page.unroute(tenants)
    trouble(server)
    server.plane.engine.unhealthy_reason = "it is being restarted"
    screen.page.route(tenants, spend_budgets)
    screen.go("now").go("needs")
    rows = screen["need-row"]
    expect(rows).to_have_count(8)
    said = {(row.get_by_role("link").first.inner_text(), row.inner_text()) for row in rows.all()}
    kinds = {
        "being restarted": "",
        "6 of 12 requests failed": "acme/billing",
        "files of v1 (released) changed": "acme/support",
        "The guard rolled it back": "acme/support",
        "99 of 1,000 tokens are left": "acme",
        "numerical_mismatch": "acme/notes@v2",
        "unsafe_file": "acme/new",
        "23 of 25 are used": "acme: adapters",
    }
    for words, where in kinds.items():
        assert any(words in text and link.endswith(where) for link, text in said), (words, said)
    rows.filter(has_text="requests failed").get_by_role("link").first.click()
    expect(screen.page.get_by_role("heading", level=1)).to_contain_text("Release of acme/billing")
    server.plane.engine.unhealthy_reason = None


def refuse(server: WholeServer, by: Actor, name: str, *, of: str) -> None:
    """An upload to this adapter of tenant `of`, refused."""
    with server.plane.database.write() as session:
        record(
            session,
            by,
            "version.upload",
            f"tenants/{of}/adapters/{name}/versions",
            tenant_id=of,
            outcome="refused",
            code="unsafe_file",
        )


def test_a_tenant_neither_hides_another_nor_speaks_in_its_name(server: WholeServer, screen: Screen) -> None:
    loud = Actor("key", "loud", "k1")
    refuse(server, Actor("key", "acme", "k2"), "quiet", of="acme")
    refuse(server, loud, "call-this-number", of="acme")
    for number in range(30):
        refuse(server, loud, f"n{number}", of="loud")
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "needs")
    rows = screen["need-row"]
    expect(rows.filter(has_text="acme/quiet")).to_have_count(1)
    assert 0 < rows.filter(has_text="loud/").count() < 20
    expect(rows.filter(has_text="call-this-number")).to_have_count(0)
    expect(screen["need-more"].get_by_role("link")).to_have_attribute(
        "href", "#/audit?action=version.upload&outcome=refused"
    )
    expect(screen["need-more"]).to_contain_text("By tenant: loud 12")


def begin_release(server: WholeServer, name: str, *, days: float) -> None:
    """A release of v2 with a guard, whose step began so long ago, and that was looked at then."""
    releases = server.plane.services.releases
    targets = [ReleaseTarget("v1", 90), ReleaseTarget("v2", 10)]
    info = releases.put("acme", name, targets, plan=ReleasePlan(guard={"min_requests": 5}))
    assert info.run is not None
    began = info.run.since - days * 86_400
    with server.plane.database.write() as session:
        session.execute(update(ReleaseRun).where(ReleaseRun.name == name).values(since=began))
    Rounds(server.plane.database, "a", now=lambda _: began + 1).round(lambda change: None)


def end_keys(server: WholeServer) -> str:
    """Four keys of acme in use that end tomorrow, one with a name that is markup; the id of the first."""
    now = datetime.datetime.now(UTC)
    keys = server.plane.services.keys
    names = ("<b>The server says: pay</b>", "ci", "dev", "old")
    ids = [keys.create("acme", name=name)[0].id for name in names]
    with server.plane.database.write() as session:
        for number, key in enumerate(ids):
            row = session.get_one(ApiKey, key)
            row.created_at = now - datetime.timedelta(days=30)
            row.expires_at = now + datetime.timedelta(days=1, minutes=number)
            row.last_used_at = now
    return ids[0]


def make_more_trouble(server: WholeServer) -> None:
    """Every kind that comes from `GET /needs` alone; acme/walk goes on as it should, and acme/quiet has a shadow."""
    plane = server.plane
    plane.services.tenants.update("acme", {"limits": {"max_adapters": 100}})
    for name in ("stuck", "walk", "quiet"):
        for seed in (1, 2):
            plane.make_adapter(name, "acme", seed=seed)
    begin_release(server, "stuck", days=1)
    begin_release(server, "walk", days=0)
    shadow = ReleasePlan(shadow=ShadowPlan("v2", 0.25))
    plane.services.releases.put("acme", "quiet", [ReleaseTarget("v1", 100)], plan=shadow)
    digest = plane.services.catalog.get_version("acme", "billing", "v1").digest
    reloads = {"copy": {digest: 40}, "disk": {digest: 13}}
    plane.engine.engine_stats = EngineStats(reloads=reloads, num_kv_disks_off=1)


def test_each_row_leads_to_where_it_is_mended(server: WholeServer, screen: Screen) -> None:
    first_key = end_keys(server)
    make_more_trouble(server)
    screen.page.route("**/admin/v1/needs", no_room)
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "needs")
    rows = screen["need-row"]
    kinds = {
        "v2 has 10% of the traffic and got no request since": "/acme/adapters/stuck/release",
        "40 copies to the device and 13 loads from the disk in the last hour": "/acme/adapters/",
        "1 engine leaves its disk of --kv-disk alone for now": "#/now",
        "1 GiB of 100 GiB are free at /data/artifacts; 2 GiB are wanted": "#/all-adapters?sort=bytes&order=desc",
        "/data cannot be reached: Stale file handle": "#/now",
        "4 keys": "#/tenants/acme?show=keys",
    }
    for words, where in kinds.items():
        row = rows.filter(has_text=words)
        expect(row).to_have_count(1)
        assert where in (row.get_by_role("link").first.get_attribute("href") or ""), words
    under_way = screen["underway-row"]
    expect(under_way).to_have_count(2)
    expect(under_way.nth(0)).to_contain_text("v2 has 10% of the traffic since")
    expect(under_way.nth(0)).to_contain_text("The guard needs")
    expect(under_way.nth(1)).to_contain_text("v2 answers 25% of the requests unseen since")
    for place, words in (("need-more", "There are 5 more."), ("underway-more", "There are 3 more.")):
        expect(screen[place].filter(has_text=words)).to_have_count(1)
        expect(screen[place].filter(has_text=words).get_by_role("link")).to_have_count(0)
    keys = rows.filter(has_text="4 keys")
    expect(keys).to_contain_text("<b>The server says: pay</b>")
    expect(keys).to_contain_text(first_key)
    keys.get_by_role("link").click()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Tenant acme")
    expect(screen["keys"]).to_be_in_viewport()
    expect(screen["key-row"].filter(has_text=first_key)).to_have_count(1)


def test_what_was_mended_is_gone(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "needs")
    stuck = screen["need-row"].filter(has_text="acme/stuck")
    expect(stuck).to_have_count(1)
    stuck.get_by_role("link").click()
    expect(screen.page.get_by_role("heading", level=1)).to_contain_text("Release of acme/stuck")
    server.plane.services.releases.put("acme", "stuck", [ReleaseTarget("v1", 100)])
    server.plane.engine.engine_stats = EngineStats()
    screen.go("needs")
    expect(screen["underway-row"]).to_have_count(2)
    expect(stuck).to_have_count(0)
    expect(screen["need-row"].filter(has_text="copies to the device")).to_have_count(0)


def no_room(route: Route) -> None:
    answer = route.fetch()
    found = answer.json()
    disk = {
        "holds": "adapters",
        "path": "/data/artifacts",
        "free": 1 << 30,
        "wanted": 2 << 30,
        "size": 100 << 30,
        "error": None,
    }
    away = {
        **disk,
        "holds": "data",
        "path": "/data",
        "free": None,
        "size": None,
        "error": "Stale file handle",
    }
    found["disks"]["data"] = [disk, away]
    found["thrashing"]["total"] += 5
    found["shadows"]["total"] += 3
    route.fulfill(response=answer, body=json.dumps(found))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_at_three_widths(server: WholeServer, screen: Screen, theme: str) -> None:
    need_axe()
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "needs")
    screen["need-row"].first.wait_for()
    screen["theme"].select_option(theme)
    for width in (320, 900, 1400):
        screen.page.set_viewport_size({"width": width, "height": 900})
        check_axe(screen, f"needs in {theme} at {width}")
        wide = screen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{wide} pixels on a screen of {width}"
