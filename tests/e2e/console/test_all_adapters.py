"""The list of all tenants' adapters in a browser: filters, figures, changes of several, narrow screens."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from datetime import UTC, timedelta

import msgspec
import pytest
from playwright.sync_api import Browser, Route, expect
from sqlalchemy import insert

from loraplex.control.db.tables import Usage
from support.console.browser import PATIENCE_MS, Screen
from support.control.usage import ended
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
TENANTS = ("acme", "globex", "rival")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """Three tenants with two adapters each; half of the requests of globex/billing fail."""
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in TENANTS:
            running.plane.make_tenant(tenant)
            for seed, name in enumerate(("billing", "support")):
                running.plane.make_adapter(name, tenant, seed=seed)
        at = datetime.datetime.now(UTC) - timedelta(minutes=2)
        rows = [
            ended(at=at, tenant_id=tenant, adapter="billing", first_token_s=0.2, status=status)
            for tenant in TENANTS
            for status in ("stop", "internal_error" if tenant == "globex" else "stop")
        ]
        with running.plane.database.write() as session:
            session.execute(insert(Usage), [msgspec.structs.asdict(row) for row in rows])
        yield running
        running.settle()


def test_the_adapter_that_fails_is_found_by_an_address(
    server: WholeServer, screen: Screen, browser: Browser
) -> None:
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "now")
    screen["nav-adapters"].click()
    expect(screen["adapter-row"]).to_have_count(6)
    expect(screen["total-errors"]).to_contain_text("1")
    screen["filter-sort"].select_option("errors")
    screen["filter-order"].select_option("desc")
    worst = screen["adapter-row"].first
    expect(worst).to_have_attribute("data-key", "globex/billing")
    expect(worst).to_contain_text("1 (50%)")
    screen["filter-search"].fill("bill")
    screen["filter-search"].press("Enter")
    expect(screen["adapter-row"]).to_have_count(3)
    root, _, at = screen.page.url.partition("#/")
    other = Screen(browser.new_page()).sign_in(root, ADMIN_TOKEN, at)
    expect(other["adapter-row"]).to_have_count(3)
    expect(other["adapter-row"].first).to_have_attribute("data-key", "globex/billing")
    expect(other["filter-sort"]).to_have_value("errors")
    other.page.close()
    screen["nav-upload"].click()
    expect(screen.page.get_by_role("heading", level=1)).to_contain_text("Upload an adapter for acme")


def test_a_tag_is_given_and_leads_to_all_that_have_it(server: WholeServer, screen: Screen) -> None:
    server.plane.services.catalog.set_tags("rival", "support", ["eu"])
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "tenants/acme/adapters/support")
    screen["tags-change"].click()
    server.plane.services.catalog.set_tags("acme", "support", ["meanwhile"])
    screen["tags-input"].fill("eu Beta")
    screen["tags-save"].click()
    expect(screen["error"]).to_contain_text("Tag 2, 'Beta', has other characters")
    screen["tags-input"].fill("eu, beta")
    screen["tags-save"].click()
    expect(screen["tag"]).to_have_text(["beta", "eu", "meanwhile"])
    screen["tag"].nth(1).click()
    expect(screen["adapter-row"]).to_have_count(2)
    expect(screen["filter-tag"]).to_have_value("eu")
    assert screen.page.url.endswith("#/all-adapters?tag=eu")
    screen["filter-tag"].fill("beta")
    screen["filter-tag"].press("Enter")
    expect(screen["adapter-row"]).to_have_count(1)
    expect(screen["adapter-row"]).to_have_attribute("data-key", "acme/support")


def test_several_are_pinned_and_deleted_after_one_question(server: WholeServer, screen: Screen) -> None:
    for tenant in TENANTS:
        server.plane.make_adapter("spare", tenant, seed=9)
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters?search=spare")
    expect(screen["adapter-row"]).to_have_count(3)
    expect(screen["bulk-delete"]).to_be_disabled()
    screen["pick"].nth(0).check()
    screen["pick"].nth(2).check()
    screen["bulk-pin"].click()
    expect(screen["bulk-question"]).to_contain_text("Pin the newest version of 2 adapters of 2 tenants?")
    screen["bulk-yes"].click()
    expect(screen["picked"]).to_have_text("0 chosen")
    catalog = server.plane.services.catalog
    assert [(one.tenant_id, one.name) for one in catalog.pinned()] == [
        ("acme", "spare"),
        ("rival", "spare"),
    ]
    screen["pick-all"].check()
    expect(screen["bulk-tag"]).to_be_disabled()
    for act, question, tagged in (
        ("tag", "Add the tag eu to 3 adapters of 3 tenants?", ("eu", "old")),
        ("untag", "Remove the tag eu from 3 adapters of 3 tenants? 3 of them have it.", ("old",)),
    ):
        if act == "tag":
            catalog.set_tags("rival", "spare", ["old"])
            screen["bulk-tag-name"].fill("eu")
        screen["pick-all"].check()
        screen[f"bulk-{act}"].click()
        expect(screen["bulk-question"]).to_contain_text(question)
        screen["bulk-yes"].click()
        expect(screen["picked"]).to_have_text("0 chosen")
        assert catalog.get_adapter("rival", "spare").tags == tagged
    screen["pick-all"].check()
    screen["bulk-delete"].click()
    expect(screen["bulk-question"]).to_contain_text("Delete 3 adapters of 3 tenants with all 3 versions?")
    screen["bulk-no"].click()
    assert catalog.get_adapter("acme", "spare").num_versions == 1

    def delete_first(route: Route) -> None:
        catalog.delete_adapter("globex", "spare")
        route.continue_()

    screen.page.route("**/tenants/globex/adapters/spare", delete_first)
    screen["bulk-delete"].click()
    screen["bulk-yes"].click()
    expect(screen["bulk-failed"]).to_contain_text("1 did not change.")
    expect(screen["bulk-failed"]).to_contain_text("globex/spare")
    expect(screen["empty"]).to_be_visible()
    left = [row.name for tenant in TENANTS for row in catalog.list_adapters(tenant).items]
    assert left == ["billing", "support"] * 3


def test_a_change_of_several_goes_on_while_another_list_is_shown(server: WholeServer, screen: Screen) -> None:
    """The first deletion waits until the filter has changed; the second is refused."""
    for tenant in TENANTS:
        server.plane.make_adapter("later", tenant, seed=9)
    held: list[Route] = []
    refusal = json.dumps({"status": 409, "code": "conflict", "detail": "It is in use."})
    tenants = "**/admin/v1/tenants"
    screen.page.route(f"{tenants}/acme/adapters/later", lambda route: held.append(route))
    screen.page.route(
        f"{tenants}/globex/adapters/later", lambda route: route.fulfill(status=409, body=refusal)
    )
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters?search=later")
    expect(screen["adapter-row"]).to_have_count(3)
    screen["pick-all"].check()
    screen["bulk-delete"].click()
    screen["bulk-yes"].click()
    expect(screen["picked"]).to_have_text("0 of 3 done…")
    screen["filter-search"].fill("bill")
    screen["filter-search"].press("Enter")
    expect(screen["adapter-row"].first).to_have_attribute("data-key", "acme/billing")
    expect(screen["picked"]).to_have_text("0 of 3 done…")
    expect(screen["bulk-delete"]).to_be_disabled()
    held[0].continue_()
    expect(screen["bulk-failed"]).to_contain_text("globex/later: It is in use.")
    expect(screen["picked"]).to_have_text("0 chosen")
    catalog = server.plane.services.catalog
    left = [
        tenant for tenant in TENANTS if "later" in {row.name for row in catalog.list_adapters(tenant).items}
    ]
    assert left == ["globex"]
    catalog.delete_adapter("globex", "later")


def test_each_failure_is_named_and_stays_chosen_while_it_is_listed(
    server: WholeServer, screen: Screen
) -> None:
    names = [f"gone-{number:02}" for number in range(12)]

    def list_gone(route: Route) -> None:
        answer = route.fetch()
        page = answer.json()
        page["data"] = [page["data"][0] | {"tenant": "acme", "name": name} for name in names]
        route.fulfill(response=answer, body=json.dumps(page))

    screen.page.route("**/admin/v1/adapters?*", list_gone)
    screen.with_clock().sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters")
    screen["pick-all"].check()
    screen["bulk-delete"].click()
    screen["bulk-yes"].click()
    expect(screen["bulk-failed"].get_by_role("listitem")).to_have_count(12)
    expect(screen["picked"]).to_have_text("12 chosen")
    del names[3:]
    screen.pass_time(16)
    expect(screen["adapter-row"]).to_have_count(3)
    expect(screen["picked"]).to_have_text("3 chosen")
    names.append("gone-11")
    screen.pass_time(16)
    expect(screen["adapter-row"]).to_have_count(4)
    expect(screen["picked"]).to_have_text("3 chosen")


def test_hostile_texts_stay_texts(server: WholeServer, screen: Screen) -> None:
    hurt = "<img src=x onerror=window.hurt=1>"

    def poison(route: Route) -> None:
        answer = route.fetch()
        page = answer.json()
        texts = dict.fromkeys(("tenant", "name", "version", "state", "run"), hurt)
        texts |= {"released": [{"version": hurt, "weight": 1}], "residency": [hurt], "tags": [hurt]}
        page["data"] = [row | texts for row in page["data"]]
        page["totals"]["states"] = {hurt: 1}
        route.fulfill(response=answer, body=json.dumps(page))

    screen.page.route("**/admin/v1/adapters?*", poison)
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters")
    screen["adapter-row"].first.wait_for()
    assert hurt in screen.page.locator("main").inner_text()
    screen["pick"].first.check()
    screen["bulk-delete"].click()
    expect(screen["bulk-question"]).to_be_visible()
    assert screen.page.evaluate("window.hurt") is None
    assert screen.page.locator("main img").count() == 0
