"""A tenant from its making to its deletion in a browser, its keys' rights, and its usage as a file."""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import insert

from loraplex.control.catalog.series import SeriesRules
from loraplex.control.db.tables import Usage
from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.control.usage import ended
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
WIDTHS = (320, 720, 1280)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme", weight=2.0, limits={"max_adapters": 4})
        yield running
        running.settle()


@pytest.fixture
def admin(server: WholeServer, screen: Screen) -> Screen:
    return screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants")


def of_api(server: WholeServer, path: str) -> Any:
    return server.http.get(f"{server.admin_url}/admin/v1/{path}", headers=bearer(ADMIN_TOKEN)).json()


def test_a_tenant_is_made_gets_a_key_and_is_deleted(server: WholeServer, admin: Screen) -> None:
    """The question counts what it erases, and takes the tenant's id alone for an answer."""
    heading = admin.page.get_by_role("heading", level=1)
    admin["all-tenants"].click()
    expect(admin["tenant-row"]).to_have_count(1)
    admin["tenant-new"].click()
    admin["set-id"].fill("acme")
    admin["set-display_name"].fill("Globex")
    admin["set-weight"].fill("1.5")
    admin["tenant-save"].click()
    expect(admin["error"]).to_contain_text("There is a tenant 'acme' already.")
    admin["set-id"].fill("globex")
    admin["tenant-save"].click()
    expect(heading).to_have_text("Tenant globex")
    assert (of_api(server, "tenants/globex")["weight"], admin.text("tenant-name")) == (1.5, "Name\nGlobex")
    admin["key-name"].fill("ci")
    admin["key-create"].click()
    secret = admin.text("key-secret")
    server.plane.make_adapter("support", "globex", seed=1)
    server.plane.make_adapter("support", "globex", seed=2)
    server.plane.services.series.put("globex", "steps", SeriesRules(1, 1))
    admin["tenant-delete"].click()
    for counted in (
        "1 key:",
        "1 adapter with 2 versions",
        "the rules of 1 series",
        "2 texts",
        "0 files",
        "0 batches",
    ):
        expect(admin["erased"]).to_contain_text(counted)
    expect(admin["kept"]).to_contain_text("no usage")
    admin["tenant-delete-typed"].fill("acme")
    expect(admin["tenant-delete-yes"]).to_be_disabled()
    admin["tenant-delete-no"].click()
    assert of_api(server, "tenants/globex")["id"] == "globex"
    admin["tenant-delete"].click()
    admin["tenant-delete-typed"].fill("globex")
    admin["tenant-delete-yes"].click()
    expect(heading).to_have_text("Tenants")
    expect(admin["tenant-row"]).to_have_count(1)
    assert of_api(server, "tenants/globex")["code"] == "tenant_not_found"
    assert server.http.get(f"{server.data_url}/v1/models", headers=bearer(secret)).status_code == 401
    admin["nav-tenants"].click()
    expect(heading).to_have_text("Tenant acme")


def test_a_suspended_tenant_is_refused_until_it_is_resumed(server: WholeServer, admin: Screen) -> None:
    """What runs goes on to its end."""
    server.plane.make_tenant("paused")
    secret = server.plane.make_key("paused", "inference")
    asked: dict[str, Any] = {"model": SERVED_NAME, "prompt": "hello", "stream": True}

    def ask() -> httpx.Response:
        return server.http.post(f"{server.data_url}/v1/completions", headers=bearer(secret), json=asked)

    admin.go("tenants/paused")
    server.plane.engine.script(Reply(text="whole", hold=True, hold_after=2))
    with (
        httpx.Client(timeout=60) as client,
        client.stream(
            "POST", f"{server.data_url}/v1/completions", headers=bearer(secret), json=asked
        ) as running,
    ):
        assert running.status_code == 200
        admin["tenant-suspend"].click()
        admin["tenant-suspend-yes"].click()
        expect(admin["suspended"]).to_contain_text("tenant_suspended")
        refused = ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")

        async def release() -> None:
            server.plane.engine.release()

        server.call(release)
        told = "".join(running.iter_text())
    texts = [json.loads(line[6:])["choices"] for line in told.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for choices in texts for choice in choices) == "whole"
    admin.go("all-tenants")
    expect(admin["tenant-row"].filter(has_text="paused")).to_contain_text("suspended")
    admin.go("tenants/paused")
    admin["tenant-resume"].click()
    expect(admin["tenant-suspend"]).to_be_visible()
    assert ask().status_code == 200
    server.plane.services.tenants.delete("paused")


def test_a_keys_rights_are_set_and_changed(server: WholeServer, admin: Screen) -> None:
    """Only what was touched is sent; a refused key stays in its form."""
    admin["key-name"].fill("narrow")
    admin["key-more"].click()
    admin["key-models"].fill("support, billing@v2")
    admin["key-expires_at"].fill("2001-01-01T00:00")
    admin["key-create"].click()
    expect(admin["error"]).to_contain_text("'expires_at' lies in the past.")
    expect(admin["key-models"]).to_have_value("support, billing@v2")
    admin["key-expires_at"].fill("2099-01-02T03:04")
    admin["key-max_concurrency"].fill("3")
    admin["key-create"].click()
    row = admin["key-row"].filter(has_text="narrow")
    expect(row).to_contain_text("billing@v2, support")
    expect(row).to_contain_text("Requests at a time: 3")
    expect(admin["key-name"]).to_have_value("")
    (made,) = of_api(server, "tenants/acme/keys")["data"]
    assert made["expires_at"].startswith("2099-01-0")
    server.plane.services.keys.update("acme", made["id"], {"limits": {"requests_per_minute": 9}})
    row.get_by_test_id("key-change").click()
    expect(admin["key-name"]).to_be_focused()
    expect(admin["key-expires_at"]).to_have_value("2099-01-02T03:04")
    admin["key-models"].fill("")
    admin["scope-usage:read"].check()
    admin["key-max_concurrency"].fill("")
    admin["key-token_budget"].fill("500")
    admin["key-save"].click()
    expect(admin["key-create"]).to_be_visible()
    expect(row).to_contain_text("Tokens of this month: 0 of 500")
    (changed,) = of_api(server, "tenants/acme/keys")["data"]
    limits = {name: value for name, value in changed["limits"].items() if value is not None}
    assert limits == {"requests_per_minute": 9, "token_budget": 500, "budget_period": "month"}
    assert changed["scopes"] == ["inference", "usage:read"]
    assert (changed["models"], changed["expires_at"], changed["name"]) == (None, made["expires_at"], "narrow")


def test_what_another_operator_took_from_a_key_stays_away(server: WholeServer, admin: Screen) -> None:
    """A form that was open meanwhile adds and takes what was touched in it; one that was not touched sends nothing."""
    keys = server.plane.services.keys
    made, _ = keys.create(
        "acme", name="shared", scopes=["inference", "adapters:write"], models=["billing", "support"]
    )
    row = admin["key-row"].filter(has_text="shared")
    row.get_by_test_id("key-change").click()
    keys.update("acme", made.id, {"scopes": ["inference"], "models": ["support"]})
    admin["scope-usage:read"].check()
    admin["key-models"].fill("billing, support, legal")
    admin["key-save"].click()
    expect(row).to_contain_text("inference, usage:read")
    expect(row).to_contain_text("legal, support")
    (now,) = [one for one in of_api(server, "tenants/acme/keys")["data"] if one["id"] == made.id]
    assert (now["scopes"], now["models"]) == (["inference", "usage:read"], ["legal", "support"])
    audited = len(of_api(server, "audit?action=key.update")["data"])
    row.get_by_test_id("key-change").click()
    admin["key-save"].click()
    expect(admin["key-create"]).to_be_visible()
    assert len(of_api(server, "audit?action=key.update")["data"]) == audited


def test_usage_is_saved_by_day_adapter_and_key(server: WholeServer, admin: Screen, tmp_path: Path) -> None:
    """All pages of it, as one table."""
    now = datetime.datetime.now(UTC)
    rows = [
        ended(
            at=now - timedelta(days=number % 28, seconds=1),
            tenant_id="acme",
            key_id=f"key-{number % 25}",
            adapter="=cmd" if number % 50 else "support",
            status="stop",
        )
        for number in range(700)
    ]
    with server.plane.database.write() as session:
        session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
    admin.page.reload()
    admin.enter(ADMIN_TOKEN)
    expect(admin["usage-row"]).to_have_count(2)
    admin["usage-by"].select_option("key")
    expect(admin["usage-row"]).to_have_count(25)
    expect(admin["usage-row"].filter(has_text="key-7")).to_contain_text("28")
    with admin.page.expect_download() as saved:
        admin["usage-csv"].click()
    saved.value.save_as(tmp_path / "usage.csv")
    assert saved.value.suggested_filename.startswith("usage-acme-")
    with open(tmp_path / "usage.csv", newline="") as file:
        table = list(csv.DictReader(file))
    wanted = {(row.at.date(), row.adapter, row.key_id) for row in rows}
    assert len(table) == len(wanted) > 500
    assert {row["adapter"] for row in table} == {"'=cmd", "support"}
    assert sum(int(row["requests"]) for row in table) == 700


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(server: WholeServer, browser: Browser, theme: str) -> None:
    need_axe()
    server.plane.services.keys.create("acme", name="of axe", limits={"max_concurrency": 2})
    for wide in WIDTHS:
        with browser.new_context(viewport={"width": wide, "height": 800}) as context:
            screen = Screen(context.new_page())
            screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-tenants")
            screen["theme"].select_option(theme)
            screen["tenant-new"].click()
            screen["tenant-row"].first.wait_for()
            check_axe(screen, "all-tenants")
            screen.go("tenants/acme")
            screen["key-change"].first.click()
            check_axe(screen, "a key's form")
            screen["tenant-delete"].click()
            screen["erased"].wait_for()
            check_axe(screen, "a tenant's deletion")
            assert screen.page.evaluate("() => document.documentElement.scrollWidth") <= wide
