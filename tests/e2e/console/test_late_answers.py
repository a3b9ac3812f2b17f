"""Answers that come after the page was left, or after a newer question: the newer page and the newer rows stay."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

HOLD_EVENTS = """
addEventListener("hashchange", (event) => {
  if (window.isHeld) event.stopImmediatePropagation();
});
"""
"""The browser tells a page of its new address in an event of its own, some time after the address is new."""
LATER = (
    "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
)
"""Two frames on: what an answer changes is shown, and what follows from that is done."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in ("acme", "rival"):
            running.plane.make_tenant(tenant)
            running.plane.make_adapter("support", tenant)
        yield running
        running.settle()


@contextmanager
def held(screen: Screen, urls: str | re.Pattern[str], most: int = 100) -> Iterator[list[Any]]:
    """The server's answers to the first `most` of `urls` come when the block ends. The list has what it answered."""
    routes: list[Route] = []
    answers: list[Any] = []

    def hold(route: Route) -> None:
        if len(routes) >= most:
            return route.continue_()
        routes.append(route)
        answers.append(route.fetch())

    screen.page.route(urls, hold)
    yield answers
    for route, answer in zip(routes, answers, strict=True):
        route.fulfill(response=answer)
    screen.page.unroute(urls)


def wait_for_one(screen: Screen, found: list[Any]) -> None:
    while not found:
        screen.page.wait_for_timeout(10)


def heading(screen: Screen, text: str) -> None:
    expect(screen.page.get_by_role("heading", level=1)).to_have_text(text)


LIST = "**/admin/v1/tenants?*"


def test_the_first_tenant_is_not_taken_for_an_address_that_was_left(
    server: WholeServer, screen: Screen
) -> None:
    """The list of tenants comes between a click on a link and the browser's word of it."""
    screen.page.add_init_script(HOLD_EVENTS)
    with held(screen, LIST) as lists:
        screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants")
        wait_for_one(screen, lists)
        screen.page.evaluate("window.isHeld = true")
        screen.go("tenants/rival/adapters/none")
    expect(screen.page.locator("datalist option")).to_have_count(2)
    screen.page.evaluate("() => { window.isHeld = false; dispatchEvent(new Event('hashchange')); }")
    heading(screen, "Adapter rival/none")
    assert screen.page.url.endswith("#/tenants/rival/adapters/none")


def test_the_first_tenant_is_not_taken_for_the_next_address(server: WholeServer, screen: Screen) -> None:
    """The list of tenants is shown, and the choice of the first is due, when a link leads to another tenant."""
    began = datetime.datetime.now(datetime.UTC)
    screen.page.clock.install(time=began)
    with held(screen, LIST) as lists:
        screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "adapters")
        wait_for_one(screen, lists)
        screen.page.clock.pause_at(began + datetime.timedelta(hours=1))
    # What is to be done after the next frame waits for the clock.
    expect(screen.page.locator("datalist option")).to_have_count(2)
    screen.go("tenants/rival/adapters")
    screen.page.clock.resume()
    heading(screen, "Adapters of rival")
    assert screen.page.url.endswith("#/tenants/rival/adapters")


READY = {
    "": "tenant-name",
    "/adapters": "adapter-row",
    "/adapters/support": "version-row",
    "/adapters/support/release": "release-row",
}
"""What shows that a page below a tenant's address has read what it shows."""


def test_answers_for_a_page_that_was_left_are_not_shown(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "playground")
    for rest, ready in READY.items():
        with held(screen, re.compile("/tenants/acme")) as answers:
            screen.go(f"tenants/acme{rest}")
            wait_for_one(screen, answers)
            screen.go(f"tenants/rival{rest}")
            screen[ready].first.wait_for()
        screen.page.evaluate(LATER)
        assert "rival" in screen.page.get_by_role("heading", level=1).inner_text()
        assert "acme" not in screen.page.locator("main").inner_text(), rest


def test_a_page_whose_module_comes_late_is_not_shown(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    with held(screen, "**/pages/audit.js") as modules:
        screen["nav-audit"].click()
        wait_for_one(screen, modules)
        screen.go("tenants/rival/adapters")
        screen["adapter-row"].first.wait_for()
    screen.page.evaluate(LATER)
    heading(screen, "Adapters of rival")


def test_the_secret_of_a_new_key_is_not_shown_on_another_tenants_page(
    server: WholeServer, screen: Screen
) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants/acme")
    with held(screen, "**/tenants/acme/keys") as made:
        screen["key-create"].click()
        wait_for_one(screen, made)
        screen.go("tenants/rival")
        expect(screen["tenant-name"]).to_have_text(re.compile("rival"))
    screen.page.evaluate(LATER)
    expect(screen["key-secret"]).to_have_count(0)


def test_a_change_is_shown_beside_a_reading_that_began_before_it(server: WholeServer, screen: Screen) -> None:
    """The older reading neither keeps the newer one from being asked for, nor replaces it."""
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants/acme")
    screen["tenant-name"].wait_for()
    with held(screen, "**/keys?*", most=1) as older:
        screen.page.evaluate("dispatchEvent(new Event('online'))")  # each page reads again
        wait_for_one(screen, older)
        screen["key-create"].click()
        row = screen["key-row"].filter(has_text=screen.text("key-secret").split("_")[1])
        expect(row).to_have_count(1)
    screen.page.evaluate(LATER)
    expect(row).to_have_count(1)


def test_a_refusal_of_the_last_key_does_not_end_the_next_session(server: WholeServer, screen: Screen) -> None:
    first, second = (server.plane.make_key("acme", "adapters:read", "adapters:write") for _ in range(2))
    screen.sign_in(server.admin_url, first, "adapters/support")
    asked: list[Route] = []
    screen.page.route("**/pin", lambda route: asked.append(route))
    screen["pin"].click()
    wait_for_one(screen, asked)
    screen["sign-out"].click()
    screen.enter(second)["pin"].wait_for()
    with screen.page.expect_response("**/pin"):
        asked[0].fulfill(status=401, json={"code": "invalid_key", "detail": "The key was revoked."})
    screen.page.evaluate(LATER)
    expect(screen["pin"]).to_be_visible()


def test_what_is_typed_into_a_filter_is_not_the_next_pages(server: WholeServer, screen: Screen) -> None:
    """A browser tells the text of a field that has the focus when the field is removed, with the page that is left."""
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    screen["now-adapter"].press_sequentially("abc")
    screen.go("audit")
    screen["audit-row"].first.wait_for()
    assert screen.page.url.endswith("#/audit")
    screen["audit-action"].press_sequentially("abc")
    screen.page.go_back()
    screen["now-server"].wait_for()
    assert screen.page.url.endswith("#/now")
