"""Tenants and their keys in a browser: limits, usage, a key's life; and what a tenant's own key sees."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator
from datetime import UTC, timedelta

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
    return screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants")


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
    row.get_by_test_id("key-keep").click()
    expect(row).to_contain_text("valid")
    row.get_by_test_id("key-revoke").click()
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
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Playground")
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
    screen.sign_in(f"{server.data_url}/console", secret)
    expect(screen["tenant-name"]).to_contain_text("acme")
    with server.plane.database.write() as session:
        past = datetime.datetime.now(UTC) - timedelta(seconds=5)
        session.execute(update(ApiKey).where(ApiKey.id == secret.split("_")[1]).values(expires_at=past))
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
