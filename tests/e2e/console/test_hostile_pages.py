"""Hostile texts in every field that the pages of adapters, releases and uploads show, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Route, expect

from loraplex.control.release_types import ReleasePlan, ReleaseTarget, ShadowPlan
from loraplex.lifecycle.release_guard.rules import Rules
from support.adapters.drafts import make_adapter
from support.console.browser import PATIENCE_MS, Screen
from support.control.requests import ended_request
from support.http.admin_plane import ADMIN_TOKEN, ARCH
from support.http.whole_server import WholeServer, whole_server
from support.releases.watched import Watched

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

HURT = "<img src=x onerror='window.hurt=1'>"
HOSTILE = (
    HURT,
    "<script>window.hurt=1</script>",
    "javascript:window.hurt=1",
    "'\"><svg onload=window.hurt=1>",
    "</pre><iframe srcdoc='<script>parent.hurt=1</script>'>",
    "${window.hurt=1}{{window.hurt=1}}",
)
KEPT = ("created_at", "since", "start", "time", "next_cursor", "id", "tenant", "kind", "scopes")
"""Fields whose values the console computes with: times, and who signed in."""
MARKUP = "main img, main script, main iframe, main [onload], main [onerror], main a[href^='javascript']"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        for seed in (1, 2):
            running.plane.make_adapter("support", seed=seed)
        shadow = ReleasePlan(shadow=ShadowPlan("v2", 0.5, keep_texts=True))
        running.plane.services.releases.put("acme", "support", [ReleaseTarget("v1", 100)], plan=shadow)
        yield running


@pytest.fixture
def hostile(server: WholeServer, screen: Screen) -> Screen:
    """Signed in at a server whose answers have a hostile text in place of each text."""
    secret = server.plane.make_key("acme", "adapters:read", "adapters:write")
    screen.sign_in(f"{server.admin_url}/", secret, "playground")  # which asks the server for nothing
    screen.page.route("**/admin/v1/**", poison)
    return screen


def poison(route: Route) -> None:
    answer = route.fetch()
    if "json" not in answer.headers["content-type"]:
        route.fulfill(response=answer)
        return
    route.fulfill(response=answer, body=json.dumps(poisoned(answer.json(), iter(HOSTILE * 10_000))))


def poisoned(value: Any, texts: Iterator[str]) -> Any:
    """The same document with other texts, also in place of names of fields that are data."""
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, list):
        return [poisoned(one, texts) for one in value]
    if isinstance(value, dict):
        return {
            (next(texts) if "." in name else name): one if name in KEPT else poisoned(one, texts)
            for name, one in value.items()
        }
    return value


def is_harmless(screen: Screen) -> bool:
    return screen.page.evaluate("window.hurt") is None and screen.page.locator(MARKUP).count() == 0


def test_what_the_server_says_of_adapters_is_text(hostile: Screen) -> None:
    hostile["nav-adapters"].click()
    hostile["adapter-row"].first.wait_for()
    assert "window.hurt=1" in hostile.page.locator("main").inner_text()
    assert is_harmless(hostile)
    hostile.go("adapters/support")
    hostile["report"].wait_for()
    assert "window.hurt=1" in hostile.page.locator("main").inner_text()
    assert is_harmless(hostile)


def test_what_the_server_says_of_a_release_is_text(hostile: Screen) -> None:
    hostile.go("adapters/support/release")
    hostile["release-row"].first.wait_for()
    assert "window.hurt=1" in hostile.page.locator("main").inner_text()
    for shown in ("released-shadow", "release-shadow", "release-shadow-end", "shadow-canary"):
        assert "window.hurt=1" in hostile.text(shown), shown
    assert is_harmless(hostile)
    # The draft of such a version, its note, and what the server says of a change.
    hostile["shadow-canary"].click()
    expect(hostile["shadow-ends"]).to_contain_text("window.hurt=1")
    hostile["release-save"].click()
    expect(hostile["error"]).to_contain_text("window.hurt=1")
    assert is_harmless(hostile)


def test_what_the_server_says_of_a_guard_is_text(server: WholeServer, hostile: Screen) -> None:
    """Verdict, evidence over time, roles, reasons: all that the drawings and their words are made of."""
    plane: Any = SimpleNamespace(releases=server.plane.services.releases, database=server.plane.database)
    for seed in (1, 2):
        server.plane.make_adapter("pirate", seed=seed)
    watched = Watched(plane)
    watched.put(ReleasePlan(guard=Rules().document()), v1=50, v2=50, sticky="user")
    decider = watched.server()
    while not watched.changes:
        watched.ended(1, 8)
        watched.ended(2, 8, status="internal_error")
        watched.round(decider)
    hostile.go("adapters/pirate/release")
    hostile["course"].wait_for()
    hostile.page.get_by_text("The same in numbers").click()
    assert "hurt=1" in (hostile["course"].get_attribute("aria-label") or "")
    for shown in ("guard-evidence", "run-words", "arm", "release-row"):
        assert "hurt=1" in hostile.text(shown), shown
    assert is_harmless(hostile)


@pytest.mark.parametrize(
    "rest",
    ["", "/adapters", "/adapters/{0}", "/adapters/{0}/release", "/upload", "/playground/{0}", "/batches"],
)
def test_what_an_address_names_is_text(server: WholeServer, screen: Screen, rest: str) -> None:
    """In headings, titles, links and the choice of a tenant: anyone can send a link."""
    name = quote(HURT, safe="")
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, f"tenants/{name}{rest.format(name)}?search={name}")
    expect(screen.page.get_by_role("heading", level=1)).to_contain_text(HURT)
    expect(screen["tenant"]).to_have_value(HURT)
    assert HURT in screen.page.title()
    links = screen.page.locator("a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert all(link.startswith(("#", f"{server.data_url}/console#")) for link in links), links
    assert is_harmless(screen)


OPERATOR_PLACES = (
    ("now", "now-adapter-row"),
    ("all-tenants", "tenant-row"),
    ("tenants", "key-row"),
    ("requests", "request-row"),
    ("audit", "audit-row"),
)


def test_what_the_server_tells_operators_is_text(server: WholeServer, screen: Screen) -> None:
    server.plane.services.keys.create("acme", name="ci", models=["support"])
    server.plane.services.tenants.update("acme", {"display_name": "Acme"})
    server.apps.shared.recent.note(ended_request(trace_id="0" * 32, code="gone"))
    server.apps.shared.recent.note(ended_request(1, adapter=None, model="none", status=404))
    history = server.apps.shared.history
    history.count("acme", ("support", 1), failed=True)
    ended = history.clock() + 10
    history.clock = lambda: ended
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "playground")
    screen.page.route("**/admin/v1/**", poison)
    for place, shown in OPERATOR_PLACES:
        screen.go(place)
        screen[shown].first.wait_for()
        for detail in screen.page.locator("summary").all()[:3]:
            detail.click()
        assert "window.hurt=1" in screen.page.locator("main").inner_text()
        if place == "tenants":
            screen["key-revoke"].first.click()
            expect(screen["key-row"].first).to_contain_text("Revoking the key")
            screen["key-keep"].click()
            screen["key-change"].first.click()
            expect(screen["key-name"]).to_have_value(re.compile("hurt=1"))
            screen["tenant-delete"].click()
            keys = len(server.plane.services.keys.list("acme").items)
            expect(screen["erased"]).to_contain_text(f"{keys} key")
            screen["tenant-delete-no"].click()
        assert is_harmless(screen)
    screen["audit-verify"].click()
    expect(screen["audit-verdict"]).to_contain_text("window.hurt=1")
    assert is_harmless(screen)


def test_where_the_data_plane_is_told_to_be_is_no_link_to_code(server: WholeServer, screen: Screen) -> None:
    def told(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"data_url": "javascript:window.hurt=1//"})

    screen.page.route("**/caller", told)
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "playground")
    screen["elsewhere"].wait_for()
    assert is_harmless(screen)


def test_a_refusal_and_the_names_of_files_are_text(hostile: Screen, tmp_path: Path) -> None:
    made = make_adapter(tmp_path, ARCH, seed=3)
    hostile.go("upload")
    hostile["adapter-name"].fill("tiny")
    hostile["upload"].set_input_files([made.config, made.tensors])
    hostile["upload-send"].click()
    assert "window.hurt=1" in hostile.text("error")
    assert is_harmless(hostile)
    file = {"name": HURT.replace("/", ""), "mimeType": "text/plain", "buffer": b"x"}
    hostile["upload"].set_input_files(file)
    expect(hostile.page.locator("main")).to_contain_text("is no part of an adapter")
    assert is_harmless(hostile)
    hostile.go("adapters/%3Cimg%20src=x%20onerror=window.hurt=1%3E/upload")
    expect(hostile["adapter-name"]).to_have_value("<img src=x onerror=window.hurt=1>")
    assert is_harmless(hostile)
