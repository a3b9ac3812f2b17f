"""Tenants and their keys in a browser: limits, usage, a key's life; and what a tenant's own key sees."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import insert, update

from loraplex.control.db.tables import ApiKey, Usage
from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, bearer, whole_server

pytestmark = pytest.mark.slow

LEDGER_ROWS = 10_000
expect.set_options(timeout=PATIENCE_MS)


def fill_ledger(server: WholeServer, part: int = 0) -> None:
    """LEDGER_ROWS requests of acme to three adapters and the base over 28 days, and of a rival."""
    now = datetime.datetime.now(UTC)
    names = ("(base)", "support", "billing", "json")
    rows = [
        {
            "id": uuid.UUID(int=part * LEDGER_ROWS + number).hex,
            "at": now - timedelta(minutes=1 + number * 40_000 / LEDGER_ROWS),
            "tenant_id": "rival" if number % 10 == 0 else "acme",
            "key_id": "k",
            "adapter": names[number % 4],
            "version": 0 if number % 4 == 0 else 1,
            "digest": "",
            "endpoint": "/v1/completions",
            "streamed": False,
            "n": 1,
            "status": "stop",
            "prompt_tokens": number % 1000,
            "cached_tokens": number % 100,
            "completion_tokens": number % 77,
            "queue_s": 0.0,
            "first_token_s": 0.1,
            "total_s": 0.2,
        }
        for number in range(LEDGER_ROWS)
    ]
    with server.plane.database.write() as session:
        session.execute(insert(Usage), rows)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        limits = {
            "token_budget": 10_000,
            "budget_period": "day",
            "max_adapters": 4,
            "requests_per_minute": 60,
        }
        running.plane.make_tenant("acme", limits=limits, weight=2.0)
        running.plane.make_tenant("rival")
        for number, name in enumerate(("billing", "support")):
            running.plane.make_adapter(name, "acme", seed=number)
        fill_ledger(running)
        yield running
        running.settle()


# `server` comes before the browser: it needs an event loop in this thread.
@pytest.fixture
def admin(server: WholeServer, screen: Screen) -> Screen:
    screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants")
    screen.page.wait_for_load_state("networkidle")  # no part of the page comes above what is clicked
    return screen


def test_limits_are_changed_and_others_changes_stay(server: WholeServer, admin: Screen) -> None:
    """Only what was touched is sent. A budget comes and goes with its period."""
    tenants = server.plane.services.tenants
    server.plane.make_tenant("changed", limits={"max_adapters": 4, "requests_per_minute": 60})

    def shown() -> dict[str, Any]:
        address = f"{server.admin_url}/admin/v1/tenants/changed"
        return dict(server.http.get(address, headers=bearer(ADMIN_TOKEN)).json())

    admin.go("tenants/changed")
    admin["tenant-change"].click()
    admin["set-weight"].fill("2.5")
    admin["set-token_budget"].fill("5000")
    admin["set-max_adapters"].fill("")
    tenants.update("changed", changes={"limits": {"requests_per_minute": 90}}, reservable=None)
    admin.pass_time(10)
    admin["tenant-save"].click()
    expect(admin["tenant-change"]).to_be_visible()
    expect(admin["budget"]).to_contain_text("Tokens of this month")
    found = shown()
    limits = {name: value for name, value in found["limits"].items() if value is not None}
    assert (found["weight"], limits) == (
        2.5,
        {"requests_per_minute": 90, "token_budget": 5000, "budget_period": "month"},
    )
    admin["tenant-change"].click()
    admin["set-token_budget"].fill("6000")
    tenants.update("changed", changes={"limits": {"budget_period": "day"}}, reservable=None)
    admin["tenant-save"].click()
    expect(admin["tenant-change"]).to_be_visible()
    expect(admin["budget"]).to_contain_text("Tokens of this day")
    assert shown()["limits"]["token_budget"] == 6000
    admin["tenant-change"].click()
    admin["set-token_budget"].fill("")
    admin["set-weight"].fill("0")
    admin["tenant-save"].click()
    expect(admin["error"]).to_contain_text("weight")
    admin["set-weight"].fill("1")
    admin["tenant-save"].click()
    expect(admin["budget"]).to_have_count(0)
    assert shown()["weight"] == 1.0


def test_a_key_is_made_used_and_revoked(server: WholeServer, admin: Screen, browser: Browser) -> None:
    admin["key-name"].fill("ci <b>")
    admin["scope-usage:read"].check()
    admin["key-create"].click()
    secret = admin.text("key-secret")
    row = admin["key-row"].filter(has_text="ci <b>")
    expect(row).to_contain_text("valid")
    expect(row).to_contain_text("never")
    asked = server.http.get(f"{server.data_url}/v1/models", headers=bearer(secret))
    assert asked.status_code == 200
    own = Screen(browser.new_page()).sign_in(f"{server.data_url}/console", secret)
    expect(own["who"]).to_have_text("acme · ci <b>")
    # The secret is not shown again, however the list is read.
    admin["key-secret-done"].click()
    assert secret not in admin.page.content()
    row.get_by_test_id("key-revoke").click()
    expect(row).to_contain_text(f"Revoking the key ci <b> ({secret.split('_')[1]}) of acme")
    row.get_by_test_id("key-keep").click()
    expect(row).to_contain_text("valid")
    row.get_by_test_id("key-revoke").click()
    admin.pass_time(3)
    expect(row).to_contain_text("revoked")
    assert server.http.get(f"{server.data_url}/v1/models", headers=bearer(secret)).status_code == 401
    # The page that the key was used in ends with it, and says so.
    own.page.reload()
    own["secret"].fill(secret)
    own["sign-in"].click()
    expect(own["error"]).to_contain_text("expired or was revoked")
    own.page.close()


def test_a_rotated_key_shows_its_new_secret(server: WholeServer, admin: Screen) -> None:
    admin["key-create"].click()
    first = admin.text("key-secret")
    row = admin.page.locator(f'[data-key="{first.split("_")[1]}"]')
    row.get_by_test_id("key-rotate").click()
    expect(admin["key-secret"]).not_to_have_text(first)
    second = admin.text("key-secret")
    assert second.split("_")[1] == first.split("_")[1]
    for secret in (first, second):
        assert server.http.get(f"{server.data_url}/v1/models", headers=bearer(secret)).status_code == 200


def test_the_newest_key_comes_first_with_its_limits(server: WholeServer, admin: Screen) -> None:
    limits = {"requests_per_minute": 1200, "token_budget": 5000, "budget_period": "day"}
    rows, keys = admin["key-row"], server.plane.services.keys
    with admin.page.expect_response(lambda answer: answer.request.method == "POST"):
        admin["key-create"].click()
    newest = keys.list("acme", newest_first=True).items[0].id
    expect(rows.first).to_have_attribute(
        "data-key", newest
    )  # a reading that runs then would miss the next keys
    for name in ("older", "newer"):
        keys.create("acme", name=name, limits=limits if name == "newer" else None)
    admin.pass_time(15)
    expect(rows.first).to_contain_text("newer", timeout=30_000)  # the list is read every 15 seconds
    expect(rows.nth(1)).to_contain_text("older")
    expect(rows.first).to_contain_text("Requests per minute: 1,200")
    expect(rows.first).to_contain_text("Tokens of this day: 0 of 5,000")


PLACES = {
    "": "Tenant rival",
    "/adapters": "Adapters of rival",
    "/adapters?search=sup": "Adapters of rival",
    "/adapters/support": "Adapter rival/support",
    "/adapters/support/release": "Release of rival/support",
    "/adapters/support/upload": "Upload a version of rival/support",
    "/upload": "Upload an adapter for rival",
    "/playground/support@v1": "Playground of rival",
    "/batches": "Batches of rival",
}
"""What each address below a tenant's is headed by."""


@pytest.mark.parametrize("port", ["admin", "data"])
def test_every_address_heading_and_title_names_the_tenant_and_stays(
    server: WholeServer, screen: Screen, port: str
) -> None:
    """After a reload, and from a link, the console asks for the secret and shows the same page of the same tenant."""
    server.plane.make_adapter("support", "rival", seed=7)
    key = server.plane.make_key("rival", "usage:read", "adapters:read", "adapters:write", "inference")
    secret = ADMIN_TOKEN if port == "admin" else key
    root = f"{server.admin_url}/" if port == "admin" else f"{server.data_url}/console"
    heading = screen.page.get_by_role("heading", level=1)
    screen.page.goto(root)
    for rest, title in PLACES.items():
        screen.go(f"tenants/rival{rest}").page.reload()
        screen.enter(secret)
        expect(heading).to_have_text(title)
        expect(screen.page).to_have_title(f"{title} · Loraplex")
        assert screen.page.url == f"{root}#/tenants/rival{rest}"
    screen.page.reload()
    expect(screen["secret"]).to_be_visible()
    assert screen.page.title() == "Loraplex"


def test_a_short_address_becomes_the_tenants(server: WholeServer, screen: Screen) -> None:
    """As older consoles had them. Which tenant an operator means is asked where the page is of one adapter."""
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "adapters/support/release")
    expect(screen["empty"]).to_have_text("This address names no tenant: choose one.")
    screen["tenant"].fill("acme")
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Release of acme/support")
    # Another tenant's adapter of this name is not one click away.
    screen["tenant"].fill("rival")
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Adapters of rival")
    expect(screen["tenant"]).to_be_focused()
    screen.page.go_back()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Release of acme/support")
    expect(screen["tenant"]).to_have_value("acme")
    screen.page.go_forward()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Adapters of rival")
    screen["nav-tenants"].click()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Tenant rival")


def test_a_link_to_another_tenants_page_says_so(server: WholeServer, screen: Screen) -> None:
    key = server.plane.make_key("acme", "adapters:read", "adapters:write")
    screen.sign_in(f"{server.data_url}/console", key, "tenants/rival/adapters/support/release")
    expect(screen["error"]).to_contain_text("of the tenant rival, and this key of acme")
    assert screen["release-rollback"].count() == 0
    assert not any("/tenants/rival/" in url.replace("#/", "") for url in screen.urls), (
        "nothing of it is asked for"
    )
    screen["own-page"].click()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Adapters of acme")


def test_what_is_not_there_is_said_with_a_way_on(server: WholeServer, admin: Screen) -> None:
    for place in ("adapters/none", "adapters/none/release"):
        admin.go(f"tenants/acme/{place}")
        expect(admin["error"]).to_contain_text("This is not there.")
    admin["all-adapters"].click()
    expect(admin["adapter-row"].first).to_be_visible()
    admin.go("tenants/nobody")
    expect(admin["error"]).to_have_count(1)
    expect(admin["error"]).to_contain_text("This is not there.")
    admin["tenant"].fill("rival")
    expect(admin["tenant-name"]).to_contain_text("rival")


def test_totals_are_those_of_the_api(server: WholeServer, admin: Screen) -> None:
    check_totals(server, admin, LEDGER_ROWS)


def check_totals(server: WholeServer, admin: Screen, num_rows: int) -> None:
    admin["usage-days"].select_option("90")
    expect(admin["usage-row"]).to_have_count(4)
    asked = {"tenant": "acme", "bucket": "none", "start": "2000-01-01T00:00:00Z"}
    answer = server.http.get(f"{server.admin_url}/admin/v1/usage", params=asked, headers=bearer(ADMIN_TOKEN))
    (total,) = answer.json()["data"]
    assert total["requests"] == num_rows * 9 // 10
    for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens"):
        assert admin.text(f"total-{name}") == f"{total[name]:,}"
    cells = [row.locator("td").first.inner_text() for row in admin["usage-row"].all()]
    assert sum(int(cell.replace(",", "")) for cell in cells) == total["requests"]


def test_limits_and_the_budget_as_bars(server: WholeServer, admin: Screen) -> None:
    expect(admin["budget"]).to_contain_text("0 used, 10,000 left of 10,000")
    expect(admin["max_adapters"]).to_contain_text("2 used, 2 left of 4")
    expect(admin["requests_per_minute"]).to_contain_text("at most 60")
    admin["tenant"].fill("rival")
    expect(admin["tenant-name"]).to_contain_text("rival")
    expect(admin["budget"]).to_have_count(0)


def test_a_tenants_key_sees_its_tenant_alone(server: WholeServer, screen: Screen) -> None:
    secret = server.plane.make_key("rival", "usage:read", "adapters:read")
    screen.sign_in(f"{server.data_url}/console", secret)
    expect(screen["tenant-name"]).to_contain_text("rival")
    assert screen.text("total-requests") == f"{LEDGER_ROWS // 10:,}"
    assert not screen["tenant"].is_editable()
    for absent in ("nav-now", "nav-audit", "key-create", "key-row"):
        assert screen[absent].count() == 0
    screen.go("audit")
    expect(screen["error"].first).to_contain_text("needs the admin token")


def test_a_narrow_key_begins_where_it_may_and_says_what_it_has(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(f"{server.data_url}/console", server.plane.make_key("acme", "inference"))
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Playground of acme")
    screen["nav-tenants"].click()
    expect(screen["own-scopes"]).to_contain_text("inference")


LACKED = {
    "inference": {
        "tenants": "This key lacks the scope usage:read",
        "adapters": "This key lacks the scope adapters:read",
        "adapters/support": "This key lacks the scope adapters:read",
        "adapters/support/release": "This key lacks the scope adapters:read",
    },
    "adapters:read": {
        "upload": "This key lacks the scope adapters:write",
        "adapters/support/release": "This key lacks the scope adapters:write",
        "playground": "This key lacks the scope inference",
        "batches": "This key lacks the scope inference",
        "requests": "This key lacks the scope usage:read",
        "now": "This page needs the admin token",
        "audit": "This page needs the admin token",
    },
}
"""The sentence of each page for a key with one scope alone."""


@pytest.mark.parametrize("scope", LACKED)
def test_each_page_says_what_a_narrow_key_lacks(server: WholeServer, screen: Screen, scope: str) -> None:
    screen.sign_in(f"{server.data_url}/console", server.plane.make_key("acme", scope))
    for place, said in LACKED[scope].items():
        screen.go(place)
        expect(screen.page.locator("main")).to_contain_text(said)
        for absent in ("pin", "release-rollback"):
            assert screen[absent].count() == 0, place
        for button in screen.page.locator("button.primary").all():
            assert button.is_disabled(), place


def test_the_end_of_a_key_ends_its_page(server: WholeServer, screen: Screen) -> None:
    secret = server.plane.make_key("acme", "usage:read")
    screen.with_clock().sign_in(f"{server.data_url}/console", secret)
    expect(screen["tenant-name"]).to_contain_text("acme")
    with server.plane.database.write() as session:
        past = datetime.datetime.now(UTC) - timedelta(seconds=5)
        session.execute(update(ApiKey).where(ApiKey.id == secret.split("_")[1]).values(expires_at=past))
    screen.pass_time(5)
    expect(screen["secret"]).to_be_visible()
    expect(screen.page.get_by_role("alert")).to_contain_text("expired")


def test_the_admin_token_is_refused_on_the_data_port(server: WholeServer, screen: Screen) -> None:
    screen.page.goto(f"{server.data_url}/console")
    screen["secret"].fill(ADMIN_TOKEN)
    screen["sign-in"].click()
    expect(screen["error"]).to_contain_text("works on the admin port only")


@pytest.mark.soak
def test_totals_of_a_long_ledger(server: WholeServer, admin: Screen) -> None:
    for part in range(1, 10):
        fill_ledger(server, part)
    admin["nav-now"].click()
    admin["nav-tenants"].click()
    check_totals(server, admin, 10 * LEDGER_ROWS)
