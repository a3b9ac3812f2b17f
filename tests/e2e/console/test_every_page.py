"""Every page of the console, of a server with 500 adapters, at three widths and in both themes: axe, and what fits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.console.fleet import HURT, fleet
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
NARROWEST, NARROW, WIDTHS = 320, 360, (360, 900, 1400)
TENANT = f"tenants/{HURT[0]}"
ADAPTER = f"{TENANT}/adapters/{HURT[1]}"
OPERATORS = {
    "now": "now-tenant-row",
    "now?range=1h&sort=error_rate": "now-tenant-row",
    "needs": "need-row",
    "all-adapters?sort=errors&order=desc": "adapter-row",
    "all-tenants": "tenant-row",
    TENANT: "key-row",
    f"{TENANT}?change=limits": "set-token_budget",
    f"{TENANT}/adapters": "adapter-row",
    f"{TENANT}/adapters/none": "all-adapters",
    ADAPTER: "report",
    f"{ADAPTER}/release": "release-pause",
    f"{ADAPTER}/upload": "upload",
    f"{TENANT}/upload": "upload",
    f"{TENANT}/playground": "elsewhere",
    "all-batches": "file-row",
    f"{TENANT}/batches": "file-row",
    "requests": "request-row",
    "audit": "audit-row",
}
"""Places for the admin token, each with a part that is there once the page is whole."""
TENANTS = {
    TENANT: "own-scopes",
    f"{TENANT}/adapters": "adapter-row",
    f"{TENANT}/playground/{HURT[1]}": "play-prompt",
    f"{TENANT}/batches": "file-row",
    "requests": "request-row",
    "tenants/tenant-01": "own-page",
}
"""Places for a key, on the data port."""
SCROLLING = """() => [...document.querySelectorAll("main *")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1)
  .filter((one) => ["auto", "scroll"].includes(getComputedStyle(one).overflowX))
  .map((one) => one.outerHTML.slice(0, 200))"""
"""The parts of a page that scroll sideways."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """The fleet, with a key, a batch and a refused request of the tenant whose adapter fails."""
    with fleet(tmp_path_factory.mktemp("server")) as running:
        client = bearer(running.plane.make_key(HURT[0], "inference"))
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": SERVED_NAME}}
        files = {"file": ("night.jsonl", json.dumps(line).encode())}
        file = running.http.post(
            f"{running.data_url}/v1/files", data={"purpose": "batch"}, files=files, headers=client
        ).json()
        batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        assert running.http.post(f"{running.data_url}/v1/batches", json=batch, headers=client).is_success
        asked = {"model": "none", "prompt": "a"}
        url = f"{running.data_url}/v1/completions"
        assert running.http.post(url, json=asked, headers=client).status_code == 404
        yield running
        running.settle()


def check_place(screen: Screen, place: str, ready: str) -> None:
    screen.go(place)
    screen[ready].first.wait_for()
    expect(screen["loading"]).to_have_count(0)
    for width in (NARROWEST, *WIDTHS):
        screen.page.set_viewport_size({"width": width, "height": 900})
        wide = screen.page.evaluate("document.documentElement.scrollWidth")
        assert wide == width, f"{place}: {wide} pixels on a screen of {width}"
        if width <= NARROW:
            assert screen.page.evaluate(SCROLLING) == [], f"{place} scrolls sideways at {width}"
        if width in WIDTHS:
            check_axe(screen, f"{place} at {width}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_of_operators(server: WholeServer, screen: Screen, theme: str) -> None:
    need_axe()
    screen.page.goto(f"{server.admin_url}/")
    check_axe(screen, "sign-in")
    screen.enter(ADMIN_TOKEN)["theme"].select_option(theme)
    for place, ready in OPERATORS.items():
        check_place(screen, place, ready)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_of_a_key(server: WholeServer, screen: Screen, theme: str) -> None:
    need_axe()
    scopes = ("inference", "adapters:read", "adapters:write", "usage:read")
    screen.sign_in(f"{server.data_url}/console", server.plane.make_key(HURT[0], *scopes))
    screen["theme"].select_option(theme)
    for place, ready in TENANTS.items():
        check_place(screen, place, ready)
