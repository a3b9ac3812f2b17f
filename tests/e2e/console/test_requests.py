"""The page of requests that failed or were slow: found by id, each leading to its adapter and its tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.control.requests import ended_request
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
PROMPT = "a prompt that nobody may keep"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in ("acme", "rival"):
            running.plane.make_tenant(tenant)
            running.plane.make_adapter("support", tenant)
        yield running
        running.settle()


def ask(server: WholeServer, secret: str, label: str, **body: object) -> int:
    """The status of a completion with this request id."""
    headers = bearer(secret) | {"x-request-id": label}
    asked = {"model": "support", "prompt": PROMPT, "max_tokens": 4} | body
    return server.http.post(f"{server.data_url}/v1/completions", headers=headers, json=asked).status_code


def test_a_failed_request_is_found_by_its_id(server: WholeServer, screen: Screen) -> None:
    secret = server.plane.make_key("acme", "inference")
    assert ask(server, secret, "was-answered") == 200
    assert ask(server, secret, "asks-for-none", model="none <b>", prompt=PROMPT) == 404
    assert ask(server, "lpx_nobody", "no-key") == 401
    server.plane.engine.kill()
    assert ask(server, secret, "found-no-engine") == 503
    server.plane.engine.revive()
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    screen["nav-requests"].click()
    rows = screen["request-row"]
    expect(rows).to_have_count(4)
    expect(rows.first).to_contain_text("found-no-engine")
    assert PROMPT not in screen.page.content()
    screen["filter-id"].fill("found-no-engine")
    screen["filter-id"].press("Enter")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("503 engine_restarting")
    assert screen.page.url.endswith("#/requests?id=found-no-engine")
    rows.locator("summary").click()
    expect(rows).to_contain_text(secret.split("_")[1])
    assert secret not in screen.page.content()
    rows.get_by_role("link", name="support@v1").click()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Adapter acme/support")
    # Back from the adapter: all of its requests. The one that was answered is slow for want of others.
    screen["nav-adapter-requests"].click()
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="was-answered")).to_contain_text("29")
    screen["filter-kind"].select_option("slow")
    expect(rows).to_have_count(1)
    screen.go("requests?status=404")
    expect(rows).to_contain_text("none <b> (not served)")
    screen.go("requests?id=nothing-like-this")
    expect(screen["empty"]).to_have_text("No request with this id is kept.")
    screen.go("requests?kind=nonsense")
    expect(screen["error"]).to_be_visible()


def test_a_tenants_key_sees_its_own(server: WholeServer, screen: Screen) -> None:
    for tenant in ("acme", "rival"):
        label = f"of-{tenant}"
        assert ask(server, server.plane.make_key(tenant, "inference"), label, model="none") == 404
    key = server.plane.make_key("rival", "usage:read", "adapters:read")
    screen.sign_in(f"{server.data_url}/console", key, "requests?tenant=acme")
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Requests of rival")
    expect(screen["request-row"]).to_have_count(1)
    expect(screen["request-row"]).to_contain_text("of-rival")
    assert screen["filter-tenant"].count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(server: WholeServer, browser: Browser, theme: str) -> None:
    need_axe()
    for number in range(60):
        server.apps.shared.recent.note(
            ended_request(number, status=(500, 429)[number % 2], code="internal_error", load_s=0.25)
        )
    for wide in (320, 720, 1280):
        with browser.new_context(viewport={"width": wide, "height": 800}) as context:
            shown = Screen(context.new_page())
            shown.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "requests")
            shown["theme"].select_option(theme)
            shown["request-row"].first.locator("summary").click()
            check_axe(shown, f"requests at {wide}")
            assert shown.page.evaluate("() => document.documentElement.scrollWidth") <= wide
