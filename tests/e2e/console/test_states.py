"""The console in trouble and in size: a restart, no database, no engine, hostile texts, ten thousand adapters."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect
from sqlalchemy import insert, select, update

from loraplex.control.audit.recorder import Actor
from loraplex.control.db.outage import Outage
from loraplex.control.db.tables import Adapter, AdapterVersion
from loraplex.engine.reports import EngineStats, TenantStats
from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server
from support.servers.live_server import free_ports

pytestmark = pytest.mark.slow

NUM_ADAPTERS = 10_000
HOSTILE = (
    "<script>window.hurt=1</script>",
    "<img src=x onerror=window.hurt=1>",
    '"><svg onload=window.hurt=1>',
    "javascript:window.hurt=1",
    "${window.hurt=1}",
    "{{constructor.constructor('window.hurt=1')()}}",
    "</title></textarea><iframe srcdoc='<script>parent.hurt=1</script>'>",
    "'-window.hurt=1-'",
    "<a href=//evil.example>click</a>",
    "<b>bold</b> &lt;i&gt; &#x3c;i>",
)
"""Texts that are code to a page that makes markup of them."""
expect.set_options(timeout=PATIENCE_MS)


def busy(tenants: dict[str, TenantStats], steps: int) -> EngineStats:
    return EngineStats(
        num_running=sum(one.running for one in tenants.values()),
        num_waiting=sum(one.waiting for one in tenants.values()),
        num_kv_blocks=100,
        num_kv_blocks_used=40,
        num_steps=steps,
        num_step_tokens=8 * steps,
        tenants=tenants,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        plane = running.plane
        for weight, tenant in ((3.0, "acme"), (1.0, "rival")):
            plane.make_tenant(tenant, weight=weight)
            plane.make_adapter("support", tenant)
        plane.engine.engine_stats = busy({"acme": TenantStats(6, 2), "rival": TenantStats(2, 5)}, 1000)
        yield running
        running.settle()


@pytest.fixture
def admin(server: WholeServer, screen: Screen) -> Screen:
    return screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")


def test_now_shows_the_batch_by_tenant(server: WholeServer, admin: Screen) -> None:
    rows = admin["batch-row"]
    expect(rows).to_have_count(2)
    assert [row.inner_text().split() for row in rows.all()] == [
        ["acme", "6", "2", "75%", "75%", "3"],
        ["rival", "2", "5", "25%", "25%", "1"],
    ]
    expect(admin["kv"]).to_contain_text("40 used, 60 left of 100")
    assert server.plane.engine.engine_stats is not None
    server.plane.engine.engine_stats = replace(server.plane.engine.engine_stats, num_kv_blocks_used=41)
    expect(admin.pass_time(2)["kv"]).to_contain_text("41 used, 59 left of 100")


NOTE_ASKED = """
window.asked = [];
const ask = window.fetch;
window.fetch = (url, options) => {
  if (String(url).endsWith("/admin/v1/engine")) window.asked.push(Date.now());
  return ask(url, options);
};
"""
"""Notes by the page's clock when the page asked for the engine."""


def test_polling_slows_down_on_errors_and_stops_in_a_hidden_tab(server: WholeServer, screen: Screen) -> None:
    """The page's clock stands still until each answer is shown, by when the next request is due at its time."""
    began, page = now(), screen.page
    page.clock.install(time=began)
    page.add_init_script(NOTE_ASKED)
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    expect(screen["batch-row"]).to_have_count(2)
    page.clock.pause_at(began + datetime.timedelta(hours=1))
    refusals = itertools.count()

    def refuse(route: Route) -> None:
        number = next(refusals)
        headers = {"retry-after": "90"} if number == 6 else {}
        route.fulfill(status=503, headers=headers, json={"detail": f"Refusal {number}."})

    def check_wait(wait_ms: int) -> None:
        before = page.evaluate("asked")
        page.clock.run_for(wait_ms)
        assert page.evaluate("asked") == [*before, before[-1] + wait_ms]

    page.route("**/admin/v1/engine", refuse)
    page.evaluate("dispatchEvent(new Event('online'))")  # the page reads at once
    for number, wait_s in enumerate((2, 4, 8, 16, 30, 30, 90)):
        expect(screen["error"].first).to_contain_text(f"Refusal {number}.")
        check_wait(1000 * wait_s)
    expect(screen["error"].first).to_contain_text("Refusal 7.")
    hide = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    asked = page.evaluate("asked")
    page.clock.run_for(120_000)
    assert page.evaluate("asked") == asked
    page.unroute("**/admin/v1/engine")
    page.evaluate(hide, False)
    expect(page.get_by_text("Refusal")).to_have_count(0)
    assert page.evaluate("asked.length") == len(asked) + 1
    check_wait(2000)


def test_the_engine_away(server: WholeServer, admin: Screen) -> None:
    expect(admin["running"]).to_contain_text("8")
    server.plane.engine.kill()
    expect(admin.pass_time(2).page.get_by_role("alert").first).to_contain_text(
        "the engine process is being restarted"
    )
    server.plane.engine.revive()
    expect(admin.pass_time(2).page.get_by_text("The engine is not ready.")).to_have_count(0)


def test_a_page_that_is_older_than_the_server_asks_for_a_reload(admin: Screen) -> None:
    expect(admin.page.get_by_text("The console is loading")).to_have_count(0)
    admin.page.route("**/pages/audit.js", lambda route: route.fulfill(status=404, body="{}"))
    admin["nav-audit"].click()
    expect(admin["error"]).to_contain_text("If the server was upgraded meanwhile, reload the console")


def gone() -> None:
    raise OSError("still gone")


def test_the_database_away(server: WholeServer, admin: Screen) -> None:
    expect(admin["batch-row"]).to_have_count(2)
    database = server.plane.database
    before, database.outage = database.outage, Outage(gone)
    try:
        database.outage.report_lost("as if")
        expect(admin.pass_time(2)["error"].first).to_contain_text("The database is away.")
        # What was read before stays to be seen.
        expect(admin["batch-row"]).to_have_count(2)
        admin["nav-tenants"].click()
        expect(admin["batch-row"]).to_have_count(0)
        expect(admin["error"].first).to_contain_text("The database is away.")
    finally:
        database.outage.close()
        database.outage = before
    expect(admin.pass_time(30)["tenant-name"]).to_be_visible()


def test_a_restart_of_the_server(tmp_path: Path, browser: Browser) -> None:
    """The page stays open and signed in: it says that nothing answers, and goes on by itself."""
    data_port, admin_port = free_ports(2)
    settings: dict[str, Any] = {"port": data_port, "admin_port": admin_port}
    # Playwright has the event loop of this thread.
    with ThreadPoolExecutor(1) as elsewhere, browser.new_context() as context:

        def start() -> Any:
            made = whole_server(tmp_path, **settings)
            elsewhere.submit(made.__enter__).result()
            return made

        def stop(made: Any) -> None:
            elsewhere.submit(made.__exit__, None, None, None).result()

        first = start()
        screen = Screen(context.new_page()).with_clock()
        screen.sign_in(f"http://127.0.0.1:{admin_port}/", ADMIN_TOKEN, "now")
        expect(screen["running"]).to_be_visible()
        stop(first)
        expect(screen.pass_time(2)["offline"]).to_be_visible()
        expect(screen["running"]).to_be_visible()
        second = start()
        expect(screen.pass_time(30)["offline"]).to_have_count(0)
        screen["nav-audit"].click()
        expect(screen.page.get_by_role("heading", name="Audit")).to_be_visible()
        assert screen.complaints == []
        stop(second)


def test_the_audit_log_and_its_verdict(server: WholeServer, admin: Screen) -> None:
    admin["nav-audit"].click()
    expect(admin["audit-row"].filter(has_text="tenant.create")).to_have_count(2)
    admin["audit-verify"].click()
    expect(admin["audit-verdict"]).to_contain_text("none changed and none missing")
    anchor = admin["audit-verdict"].locator("code").inner_text()
    wrong = anchor[:-1] + ("0" if anchor[-1] != "0" else "1")
    admin["audit-anchor"].fill(wrong)
    admin["audit-verify"].click()
    expect(admin["audit-verdict"]).to_contain_text("The log is broken at row")
    admin["audit-action"].fill("nothing.like-this")
    admin["audit-action"].press("Enter")
    expect(admin["empty"]).to_contain_text("No row fits")


def test_hostile_texts_are_text(server: WholeServer, screen: Screen) -> None:
    plane = server.plane
    plane.make_tenant("hostile")
    keys, names = plane.services.keys, list(HOSTILE)
    for text in names:
        keys.create("hostile", name=text)
    plane.services.tenants.update("hostile", changes={"display_name": HOSTILE[0]}, reservable=None)
    by = Actor("admin", None, None, HOSTILE[1], HOSTILE[2])
    plane.services.tenants.update("hostile", changes={"display_name": HOSTILE[1]}, reservable=None, by=by)
    # As a database that others write to may have them.
    with plane.database.write() as session:
        for number, text in enumerate(names):
            row = {"tenant_id": "hostile", "name": text[:63], "last_number": 1, "created_at": now()}
            session.execute(insert(Adapter), [row])
            session.execute(insert(AdapterVersion), [version_row(session, number, "hostile", text[:63])])
    secret = keys.create("hostile", name=HOSTILE[0], scopes=["usage:read", "adapters:read"])[1]
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters")
    for text in names:
        expect(screen["adapter-row"].filter(has_text=text[:63])).to_have_count(1)
    screen["nav-tenants"].click()
    screen["tenant"].fill("hostile")
    for text in names:
        expect(screen["key-row"].filter(has_text=text).first).to_be_visible()
    expect(screen["tenant-name"]).to_contain_text(HOSTILE[1])
    screen["nav-audit"].click()
    screen["audit-row"].first.wait_for()
    for detail in screen.page.locator("summary").all()[:5]:
        detail.click()
    expect(screen.page.locator("pre", has_text=HOSTILE[1]).first).to_be_visible()
    screen.page.evaluate("text => { location.hash = '#/' + text }", HOSTILE[1])
    expect(screen.page.get_by_role("heading", name="Now")).to_be_visible()
    assert screen.page.evaluate("() => window.hurt") is None
    assert screen.page.locator("main img, main iframe, main script, main b, main svg").count() == 0
    screen["sign-out"].click()
    screen.sign_in(f"{server.admin_url}/", secret)
    expect(screen["who"]).to_contain_text(HOSTILE[0])
    assert screen.page.evaluate("() => window.hurt") is None


def test_ten_thousand_adapters(server: WholeServer, admin: Screen) -> None:
    with server.plane.database.write() as session:
        names = [f"a{number:05}" for number in range(NUM_ADAPTERS)]
        adapters = [
            {"tenant_id": "rival", "name": name, "last_number": 1, "created_at": now()} for name in names
        ]
        session.execute(insert(Adapter), adapters)
        first = version_row(session, 0, "rival", "")
        session.execute(insert(AdapterVersion), [first | {"name": name} for name in names])
    admin["nav-adapters"].click()
    expect(admin["adapter-row"]).to_have_count(100)
    admin["next-page"].click()
    expect(admin["adapter-row"].first).to_contain_text("a00")
    second = admin.text("adapter-row")
    admin["next-page"].click()
    expect(admin["adapter-row"].first).not_to_have_text(second)
    assert admin["adapter-row"].count() <= 100
    admin["filter-search"].press_sequentially("a0999")
    for _ in range(2):  # what is typed stays while the page reads
        with admin.page.expect_response("**/admin/v1/adapters?*"):
            admin.pass_time(15)
    admin["filter-search"].press_sequentially("9")
    admin["filter-search"].press("Enter")
    expect(admin["adapter-row"]).to_have_count(1)
    admin["adapter-row"].get_by_role("link").first.click()
    expect(admin.page.get_by_role("heading", level=1)).to_contain_text("a09999")
    with server.plane.database.write() as session:
        session.execute(update(AdapterVersion).where(AdapterVersion.name.like("a0%")).values(state="deleted"))


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def version_row(session: Any, number: int, tenant: str, name: str) -> dict[str, Any]:
    """A version like the one of acme's adapter."""
    columns = AdapterVersion.__table__.columns
    found = session.execute(select(*columns).where(AdapterVersion.tenant_id == "acme")).mappings().first()
    return dict(found) | {"tenant_id": tenant, "name": name, "digest": f"{number:064x}"}


def test_keys_alone_reach_everything(server: WholeServer, screen: Screen) -> None:
    """From the sign-in to a page and into it, without a mouse."""
    screen.page.goto(f"{server.admin_url}/")
    screen["secret"].focus()
    screen.page.keyboard.type(ADMIN_TOKEN)
    screen.page.keyboard.press("Enter")
    screen["who"].wait_for()
    expect(screen.page.get_by_role("heading", name="Now", exact=True)).to_be_focused()
    for _ in range(12):
        screen.page.keyboard.press("Shift+Tab")
        if screen["nav-audit"].evaluate("element => element === document.activeElement"):
            break
    screen.page.keyboard.press("Enter")
    expect(screen.page.get_by_role("heading", name="Audit")).to_be_focused()
