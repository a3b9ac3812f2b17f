"""Upload, release and roll back in a real browser, over both ports of a server with a scripted engine."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from support.adapters.drafts import make_adapter
from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN, ARCH
from support.http.whole_server import WholeServer, bearer, whole_server

pytestmark = pytest.mark.slow
MOST_CLICKS = 8
EVERY_S = 3
"""How often the page of a release reads it."""
COUNT_CLICKS = """
window.clicks = 0;
addEventListener("click", (event) => { if (event.isTrusted) window.clicks += 1; }, true);
"""


expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in ("canary", "refused", "conflict", "many", "seen", "shadow", "typing", "double"):
            running.plane.make_tenant(tenant)
        yield running


def release_url(server: WholeServer, tenant: str) -> str:
    return f"{server.admin_url}/admin/v1/tenants/{tenant}/adapters/support/release"


def release_of(server: WholeServer, tenant: str) -> dict[str, Any]:
    answer = server.http.get(release_url(server, tenant), headers=bearer(ADMIN_TOKEN))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def weights(server: WholeServer, tenant: str) -> dict[str, int]:
    return {target["version"]: target["weight"] for target in release_of(server, tenant)["targets"]}


def put(server: WholeServer, tenant: str, shares: dict[str, int], **more: Any) -> None:
    body = {"targets": [{"version": name, "weight": weight} for name, weight in shares.items()], **more}
    answer = server.http.put(release_url(server, tenant), json=body, headers=bearer(ADMIN_TOKEN))
    assert answer.status_code == 200, answer.text


def release_page(server: WholeServer, screen: Screen, tenant: str, rest: str = "", seeds: int = 2) -> Screen:
    """The release page of a tenant's adapter `support`. It has some versions, and v1 takes the traffic."""
    for seed in range(1, seeds + 1):
        server.plane.make_adapter("support", tenant, seed=seed)
    put(server, tenant, {"v1": 100})
    secret = server.plane.make_key(tenant, "adapters:read", "adapters:write")
    screen.with_clock().sign_in(server.admin_url, secret, f"tenants/{tenant}/adapters/support/release{rest}")
    screen["release-save"].wait_for()
    return screen


def test_upload_canary_and_rollback_in_eight_clicks(
    server: WholeServer, screen: Screen, tmp_path: Path
) -> None:
    server.plane.make_adapter("support", "canary", seed=1)
    made = make_adapter(tmp_path, ARCH, seed=2)
    screen.page.add_init_script(COUNT_CLICKS)
    screen.sign_in(server.admin_url, server.plane.make_key("canary", "adapters:read", "adapters:write"))
    screen["nav-adapters"].click()
    screen["nav-upload"].click()
    screen["adapter-name"].fill("support")
    screen["upload"].set_input_files([made.config, made.tensors])
    screen["upload-send"].click()
    screen["canary"].click()
    expect(screen["weight-row"]).to_have_count(2)
    screen["release-save"].click()
    expect(screen["released"]).to_have_text("v1 90%, v2 10%")
    assert weights(server, "canary") == {"v1": 90, "v2": 10}
    screen["release-rollback"].click()
    expect(screen["released"]).to_have_text("v1 100%")
    assert weights(server, "canary") == {"v1": 100}
    assert screen.page.evaluate("clicks") <= MOST_CLICKS


def test_a_refused_upload_says_what_the_server_says(
    server: WholeServer, screen: Screen, tmp_path: Path
) -> None:
    made = make_adapter(tmp_path, ARCH, rank=2)
    screen.sign_in(
        server.admin_url, server.plane.make_key("refused", "adapters:read", "adapters:write"), "upload"
    )
    screen["adapter-name"].fill(server.plane.services.catalog.served_name)
    screen["upload"].set_input_files([made.config, made.tensors])
    screen["upload-send"].click()
    assert "name_reserved" in screen.text("error")
    # What can be seen in the files is said before they are sent.
    made.tensors.write_bytes(b"not safetensors")
    screen["upload"].set_input_files([made.config, made.tensors])
    expect(screen["upload-send"]).to_be_disabled(timeout=PATIENCE_MS)
    assert "does not begin as safetensors do" in screen.page.locator("main").inner_text()


def test_a_release_that_changed_meanwhile_is_shown_and_can_be_saved_over(
    server: WholeServer, screen: Screen
) -> None:
    for seed in (1, 2):
        server.plane.make_adapter("support", "conflict", seed=seed)
    secret = server.plane.make_key("conflict", "adapters:read", "adapters:write")
    screen.sign_in(server.admin_url, secret, "adapters")
    screen["adapter-row"].first.wait_for()
    screen.go("adapters/support/release/v2")
    share = screen.page.get_by_label("Percent of v2")
    share.fill("30")
    share.blur()
    expect(screen.page.get_by_label("Percent of v1")).to_have_value("70")
    # The change of another comes between: the draft names the revision that it began with.
    screen.page.route("**/release", lambda route: release_elsewhere(server, route))
    screen["release-save"].click()
    screen["conflict"].wait_for()
    assert weights(server, "conflict") == {"v1": 50, "v2": 50}, "nothing was saved over it"
    assert "v1 50%, v2 50%" in screen.text("conflict")
    screen["conflict-keep"].click()
    screen["release-save"].click()
    expect(screen["released"]).to_have_text("v1 70%, v2 30%")
    assert weights(server, "conflict") == {"v1": 70, "v2": 30}


def release_elsewhere(server: WholeServer, route: Any) -> None:
    """Just before the console's first PUT, another client releases."""
    if route.request.method == "PUT" and weights(server, "conflict") == {"v1": 100}:
        put(server, "conflict", {"v1": 50, "v2": 50})
    route.continue_()


def test_a_shadow_is_set_shown_and_ended(server: WholeServer, screen: Screen) -> None:
    page = release_page(server, screen, "shadow", seeds=3)
    page["release-shadow"].select_option("v2")
    page["shadow-share"].fill("25")
    page["shadow-texts"].check()
    page["release-save"].click()
    expect(page["released-shadow"]).to_contain_text("v2 answers 25% of the requests too")
    expect(page["released-shadow"]).to_contain_text("Prompts and answers are kept.")
    assert release_of(server, "shadow")["shadow"] == {"version": "v2", "sample": 0.25, "keep_texts": True}
    # A canary of another version leaves it, and ends beside it.
    page["add-version"].select_option("v3")
    page["add-canary"].click()
    page["release-save"].click()
    expect(page["released"]).to_have_text("v1 90%, v3 10%")
    expect(page["released-shadow"]).to_be_visible()
    page.page.get_by_label("Remove v3").click()
    page["release-save"].click()
    expect(page["released"]).to_have_text("v1 100%")
    expect(page["release-row"].first).to_contain_text("v1 100%, shadow v2 of 25%")
    # Its own canary ends it.
    page["shadow-canary"].click()
    expect(page["shadow-ends"]).to_be_visible()
    page["release-save"].click()
    expect(page["released"]).to_have_text("v1 90%, v2 10%")
    found = release_of(server, "shadow")
    assert found["shadow"] is None
    assert weights(server, "shadow") == {"v1": 90, "v2": 10}
    # One click ends another one, and leaves weights that are no whole percents.
    put(server, "shadow", {"v1": 999, "v3": 1}, shadow={"version": "v2", "sample": 0.001})
    expect(page.pass_time(EVERY_S)["released-shadow"]).to_contain_text("No texts are kept.")
    page["release-shadow-end"].click()
    expect(page["released-shadow"]).to_have_count(0)
    assert release_of(server, "shadow")["shadow"] is None
    assert weights(server, "shadow") == {"v1": 999, "v3": 1}


def test_a_draft_is_kept_from_the_first_key(server: WholeServer, screen: Screen) -> None:
    """Neither a reading of the release nor another's change takes away what is being typed."""
    page = release_page(server, screen, "typing", "/v2")
    share = page.page.get_by_label("Percent of v2")
    other = page.page.get_by_label("Percent of v1")
    share.select_text()
    share.press("Delete")
    for typed in ("", "3"):
        share.press_sequentially(typed)
        with page.page.expect_response("**/release/comparison"):
            page.pass_time(EVERY_S)
        expect(share).to_have_value(typed)
    expect(other).to_have_value("97")
    put(server, "typing", {"v1": 50, "v2": 50})
    page.pass_time(EVERY_S)["conflict"].wait_for()
    share.press_sequentially("0")
    expect(share).to_have_value("30")
    expect(other).to_have_value("70")
    page["conflict-take"].click()
    expect(share).to_have_value("50")


def test_a_save_without_a_change_makes_no_revision(server: WholeServer, screen: Screen) -> None:
    page = release_page(server, screen, "typing")
    put(server, "typing", {"v1": 997, "v2": 3}, sticky="user")
    expect(page.pass_time(EVERY_S)["released"]).to_have_text("v1 100%, v2 0%")
    before = release_of(server, "typing")["revision"]
    page["release-save"].click()
    expect(page["release-note"]).to_have_text(
        f"Nothing is changed: revision {before} of typing/support stays in force."
    )
    assert release_of(server, "typing")["revision"] == before
    page["release-sticky"].select_option("key")
    page["release-save"].click()
    expect(page["release-note"]).to_contain_text(f"Revision {before + 1} of typing/support is in force.")
    assert weights(server, "typing") == {"v1": 997, "v2": 3}, "what nobody changed is not rounded"


def test_sliders_are_off_beside_a_schedule(server: WholeServer, screen: Screen) -> None:
    page = release_page(server, screen, "typing", "/v2")
    sliders = page.page.get_by_role("slider")
    page["release-schedule"].check()
    expect(page.page.get_by_label("Percent of v2")).to_have_value("1")
    for slider in sliders.all():
        expect(slider).to_be_disabled()
    page["release-schedule"].uncheck()
    expect(page.page.get_by_label("Percent of v2")).to_have_value("10")
    expect(sliders.first).to_be_enabled()
    page["release-schedule"].check()
    page["release-save"].click()
    expect(page["release-pause"]).to_be_visible()
    expect(sliders.first).to_be_disabled()
    page["release-by-hand"].click()
    expect(sliders.first).to_be_enabled()
    page["release-save"].click()
    expect(page["release-pause"]).to_have_count(0)
    assert release_of(server, "typing")["schedule"] is None


def test_two_quick_clicks_are_one_change(server: WholeServer, screen: Screen) -> None:
    page = release_page(server, screen, "double", "/v2")
    began = release_of(server, "double")["revision"]
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.method))
    twice = "button => { button.click(); button.click(); }"
    page["release-save"].evaluate(twice)
    expect(page["released"]).to_have_text("v1 90%, v2 10%")
    put(server, "double", {"v1": 50, "v2": 50})
    expect(page.pass_time(EVERY_S)["released"]).to_have_text("v1 50%, v2 50%")
    page["release-rollback"].evaluate(twice)
    expect(page["released"]).to_have_text("v1 90%, v2 10%")
    assert sum(method in ("PUT", "POST") for method in asked) == 2
    # The second click of a slow double click, when the first has gone back already.
    expect(page["release-rollback"]).to_be_enabled()
    page["release-rollback"].dispatch_event("click", {"detail": 2})
    for _ in range(2):
        with page.page.expect_response("**/release/comparison"):
            page.pass_time(EVERY_S)
    assert release_of(server, "double")["revision"] == began + 3
    expect(page["error"]).to_have_count(0)
    expect(page["conflict"]).to_have_count(0)


def test_an_adapter_is_found_among_many_and_pinned(server: WholeServer, screen: Screen) -> None:
    for number in range(60):
        server.plane.make_adapter(f"a{number:02}", "many", seed=1)
    screen.sign_in(server.admin_url, ADMIN_TOKEN, "adapters")
    screen["tenant"].fill("many")
    screen["tenant"].press("Enter")
    expect(screen["adapter-row"]).to_have_count(50)
    screen["next-page"].click()
    expect(screen["adapter-row"]).to_have_count(10)
    screen["adapter-search"].fill("a3")
    expect(screen["adapter-row"]).to_have_count(10)
    screen["adapter-row"].first.get_by_role("link").click()
    screen["pin"].click()
    expect(screen["pin"]).to_have_text("Unpin")
    assert len(server.plane.engine.pins) == 1
    with screen.page.expect_download() as saved:
        screen["download"].click()
    assert saved.value.suggested_filename == "a30-v1.tar"
    with tarfile.open(saved.value.path()) as archive:
        assert sorted(archive.getnames()) == ["adapter_config.json", "adapter_model.safetensors"]
    expect(screen["download"]).to_have_text("Download")


def test_a_download_that_cannot_be_is_said(server: WholeServer, screen: Screen) -> None:
    server.plane.make_adapter("large", "refused", seed=1)
    screen.sign_in(server.admin_url, server.plane.make_key("refused", "adapters:read"))
    screen.go("adapters/large")
    screen["download"].wait_for()
    screen.page.evaluate(
        "() => { Response.prototype.blob = () => Promise.reject(new TypeError('cut off')); }"
    )
    screen["download"].click()
    expect(screen["error"]).to_contain_text("The download broke off")
    screen.page.route("**/versions?*", enlarged)
    screen.page.reload()
    screen.sign_in(server.admin_url, server.plane.make_key("refused", "adapters:read"))
    screen.go("adapters/large")
    expect(screen["version-row"]).to_contain_text("3 GiB")
    asked = len(screen.urls)
    screen["download"].click()
    expect(screen["error"]).to_contain_text("3 GiB are more than the 1 GiB")
    expect(screen["error"]).to_contain_text(f"-o large-v1.tar {server.admin_url}/admin/v1/tenants/refused")
    assert not any(url.endswith("/archive") for url in screen.urls[asked:])


def enlarged(route: Any) -> None:
    """The versions as if they had 3 GiB."""
    answer = route.fetch()
    page = answer.json()
    route.fulfill(response=answer, json=page | {"data": [row | {"bytes": 3 << 30} for row in page["data"]]})


PLACES = (
    ("adapters", "adapter-row"),
    ("adapters/support", "report"),
    ("adapters/support/release", "shadow-share"),
    ("adapters/support/release/v2", "shadow-ends"),
    ("adapters/none", "all-adapters"),
    ("tenants/canary", "own-page"),
    ("upload", "upload"),
    ("playground", "elsewhere"),
)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious_and_phones_show_all(
    server: WholeServer, screen: Screen, theme: str
) -> None:
    need_axe()
    for seed in (1, 2):
        server.plane.make_adapter("support", "seen", seed=seed)  # the same bytes again are no new version
    put(server, "seen", {"v1": 100}, shadow={"version": "v2", "sample": 0.1})
    screen.page.set_viewport_size({"width": 320, "height": 700})
    screen.sign_in(
        f"{server.admin_url}/", server.plane.make_key("seen", "adapters:read", "adapters:write", "inference")
    )
    screen["theme"].select_option(theme)
    for place, ready in PLACES:
        screen.go(place)
        screen[ready].first.wait_for()
        check_axe(screen, place)
        assert screen.page.evaluate("() => document.documentElement.scrollWidth") <= 320, place
