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
from loraplex.control.db.tables import Adapter, AdapterVersion, Usage
from loraplex.control.release_types import ReleaseTarget
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
    expect(screen.page.get_by_text("There are more.")).to_have_attribute(
        "href", "#/audit?action=version.upload"
    )


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
