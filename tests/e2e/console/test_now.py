"""The page Now over the last minutes and the last hour, in a real browser: who hurts, addresses, a drain."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Route, expect

from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server
from support.placement.fake_cluster import fake_report

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
TENANTS, NAMES, SLICES = 8, ("billing", "notes", "support"), 90
HURT = "tenant-5", "notes"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """Eight tenants with three adapters each, in the last quarter of an hour 2 % of whose requests failed; of one
    adapter 4 % since 4 minutes. One tenant is refused half of its requests."""
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for number in range(TENANTS):
            running.plane.make_tenant(f"tenant-{number}")
            for seed, name in enumerate(NAMES):
                running.plane.make_adapter(name, f"tenant-{number}", seed=seed)

        async def fill() -> None:
            history = running.apps.shared.history
            began = history.clock() // 60 * 60 + 60
            for slice_number in range(SLICES):
                at = began + 10.0 * slice_number
                history.clock = lambda at=at: at
                for number in range(TENANTS):
                    for name in NAMES:
                        every = (
                            25 if (f"tenant-{number}", name) == HURT and slice_number >= SLICES - 24 else 50
                        )
                        ask(running, f"tenant-{number}", name, every)
            end = began + 10.0 * SLICES
            history.clock = lambda: end

        running.call(fill)
        yield running
        running.settle()


def ask(running: WholeServer, tenant: str, name: str, every: int) -> None:
    """50 requests; one in `every` fails."""
    for number in range(50):
        refused = tenant == "tenant-2" and number % 2 == 1
        running.apps.shared.history.count(
            tenant,
            (name, 1),
            failed=number % every == 0,
            limited=refused,
            computed=0 if refused else 200,
            cached=0 if refused else 100,
            output=0 if refused else 50,
            first_token_s=None if refused else 0.05 * (1 + number % 6),
            gap_s=None if refused else 0.012 + 0.001 * (number % 20),
        )


def test_the_adapter_that_hurts_is_the_first_row_in_any_browser(
    server: WholeServer, screen: Screen, browser: Browser
) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    worst = screen["now-adapter-row"].first
    expect(worst).to_have_attribute("data-key", "tenant-5/notes/v1")
    expect(worst).to_contain_text("(3.")
    expect(screen["now-tenant-row"].first).to_have_attribute("data-key", "tenant-5")
    expect(screen["now-adapter-row"].nth(1)).to_contain_text("(2%)")
    screen["now-range"].select_option("1h")
    screen["now-sort"].select_option("limited")
    expect(screen["now-tenant-row"].first).to_have_attribute("data-key", "tenant-2")
    expect(screen["now-tenant-row"].first).to_contain_text("(50%)")
    expect(screen.page.locator(".chart canvas")).to_have_count(4)
    screen["now-tenant"].fill("tenant-2")
    screen["now-tenant"].press("Enter")
    expect(screen["now-adapter-row"]).to_have_count(len(NAMES))
    root, _, at = screen.page.url.partition("#/")
    other = Screen(browser.new_page()).sign_in(root, ADMIN_TOKEN, at)
    expect(other["now-range"]).to_have_value("1h")
    expect(other["now-adapter-row"]).to_have_count(len(NAMES))
    expect(other["now-tenant-row"]).to_have_count(1)
    other["now-adapter-row"].first.get_by_role("link").first.click()
    expect(other.page.get_by_role("heading", level=1)).to_contain_text("Adapter tenant-2/")
    other.page.close()


def test_more_than_there_are_rows_are_others(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    expect(screen["now-adapter-row"]).to_have_count(11)
    others = screen["now-adapter-row"].last
    expect(others).to_have_attribute("data-key", "others")
    expect(others).to_contain_text("21,000")  # 14 adapters, 50 requests in each of 30 slices


def test_nothing_and_a_range_that_is_none(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now?tenant=nobody")
    expect(screen["empty"].first).to_have_text("No request ended in this time.")
    screen.go("now?range=2h")
    expect(screen["error"]).to_contain_text("range")
    screen["now-range"].select_option("1h")
    expect(screen["now-adapter-row"].first).to_be_visible()


def test_another_server_that_answers_is_told(server: WholeServer, screen: Screen) -> None:
    def of_another(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        route.fulfill(response=answer, json=body | {"server": body["server"] | {"id": "other"}})

    screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    expect(screen["now-server"]).to_be_visible()
    expect(screen["now-server"]).not_to_contain_text("more than one server")
    screen.page.route("**/admin/v1/history?*", of_another)
    expect(screen.pass_time(10)["now-server"]).to_contain_text("more than one server")


def test_the_tenants_are_read_once_in_half_a_minute(server: WholeServer, screen: Screen) -> None:
    asked: list[str] = []
    screen.page.on(
        "request", lambda request: asked.append(request.url.partition("/admin/v1/")[2].partition("?")[0])
    )
    screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    expect(screen["running"]).to_be_visible()
    for _ in range(3):
        with screen.page.expect_response("**/admin/v1/engine"):
            screen.pass_time(2)
    assert asked.count("tenants") == 1
    with screen.page.expect_response("**/admin/v1/tenants?*"):
        screen.pass_time(30)


def test_an_engine_is_drained_and_used_again(server: WholeServer, screen: Screen) -> None:
    engine = server.plane.engine
    engine.num_wanted = 2
    engine.replicas = {name: fake_report(name) for name in ("replica-1", "replica-2")}
    screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    rows = screen["replica-row"]
    expect(rows).to_have_count(2)
    rows.nth(1).get_by_test_id("drain").click()
    expect(rows.nth(1)).to_contain_text("draining")
    expect(screen["drain"]).to_have_count(0)  # the other one is the last
    rows.nth(1).get_by_test_id("undrain").click()
    expect(screen["drain"]).to_have_count(2)
    assert [report.state for report in engine.replicas.values()] == ["ready", "ready"]
    engine.replicas, engine.num_wanted = None, 1


def test_hostile_names_stay_texts(server: WholeServer, screen: Screen) -> None:
    hurt = "<img src=x onerror=window.hurt=1>"

    def poison(route: Route) -> None:
        answer = route.fetch()
        body = answer.json()
        texts = {"tenant": hurt, "adapter": hurt, "version": hurt}
        for rows in ("tenants", "adapters"):
            body[rows] = [row | texts for row in body[rows][:2]]
        body["server"] |= {"id": hurt, "node": hurt}
        route.fulfill(response=answer, json=body)

    screen.page.route("**/admin/v1/history?*", poison)
    screen.sign_in(
        f"{server.admin_url}/", ADMIN_TOKEN, "now?tenant=%3Cimg%20src=x%20onerror=window.hurt=1%3E"
    )
    expect(screen["now-server"]).to_contain_text(hurt)
    expect(screen["now-tenant"]).to_have_value(hurt)
    assert screen.page.evaluate("window.hurt") is None
    assert screen.page.locator("main img").count() == 0
