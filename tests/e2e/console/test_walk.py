"""An operator's walk through 500 adapters of 40 tenants: the one that fails, its release, its neighbour, a budget."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, expect

from support.console.browser import PATIENCE_MS, Screen
from support.console.fleet import BUDGET, HURT, NEIGHBOUR, fleet
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer
from support.waiting import eventually

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)
MOST_CLICKS = 12
WORST = f"{HURT[0]}/{HURT[1]}/v2"
NEXT_TO_IT = f"{NEIGHBOUR[0]}/{NEIGHBOUR[1]}/v1"
LOOK = """() => {
  const all = (chosen, of) => [...document.querySelectorAll(chosen)].map(of);
  return {
    address: location.hash,
    heading: document.querySelector("main h1")?.innerText,
    parts: all("main h2", (one) => one.innerText),
    rows: all("main tr[data-key]", (one) => one.innerText),
    fields: all("main input, main select", (one) => [one.dataset.testid, one.value]),
    buttons: all("main button", (one) => one.innerText),
  };
}"""
"""The parts of a page that do not change with time."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with fleet(tmp_path_factory.mktemp("server")) as running:
        yield running


@dataclass
class Walk:
    """The operator's tab. Each click goes through `click`, which counts it; `views` are the seconds until each view was
    whole."""

    server: WholeServer
    screen: Screen
    browser: Browser
    clicks: int = 0
    views: list[tuple[str, float]] = field(default_factory=list)

    def click(self, where: Locator) -> None:
        self.clicks += 1
        where.click()

    def choose(self, testid: str, value: str) -> None:
        """A choice from a list is a click too."""
        self.clicks += 1
        self.screen[testid].select_option(value)

    def whole(self, name: str, *shown: Locator, began: float) -> None:
        """All of it has come, and a second browser shows the same at the same address."""
        for one in shown:
            expect(one).to_be_visible()
        self.views.append((name, time.monotonic() - began))
        self.check_address(name)

    def check_address(self, name: str) -> None:
        root, _, at = self.screen.page.url.partition("#/")
        with self.browser.new_context() as context:
            other = Screen(context.new_page()).sign_in(root, ADMIN_TOKEN, at)
            seen: list[Any] = []

            def is_same() -> bool:
                seen[:] = [one.page.evaluate(LOOK) for one in (self.screen, other)]
                return bool(seen[0] == seen[1])

            try:
                eventually(is_same)
            except AssertionError:
                raise AssertionError(f"{name}: {seen[0]}\nand in a second browser {seen[1]}") from None
            assert other.complaints == []


def row(screen: Screen, testid: str, key: str) -> Locator:
    return screen.page.locator(f'[data-testid="{testid}"][data-key="{key}"]')


def test_from_the_adapter_that_fails_to_a_larger_budget(
    server: WholeServer, screen: Screen, browser: Browser
) -> None:
    walk = Walk(server, screen, browser)
    heading = screen.page.get_by_role("heading", level=1)

    # Which adapter hurts. It has not the most errors, as it is asked less than others.
    screen.page.goto(f"{server.admin_url}/")
    screen["secret"].fill(ADMIN_TOKEN)
    began = time.monotonic()
    walk.click(screen["sign-in"])
    first = screen["now-adapter-row"].first
    walk.whole("now", first, screen.page.locator(".chart canvas").last, began=began)
    expect(row(screen, "now-adapter-row", WORST)).to_have_count(0)
    began = time.monotonic()
    walk.choose("now-sort", "error_rate")
    expect(first).to_have_attribute("data-key", WORST)
    walk.whole("now, by the part that failed", first, began=began)
    expect(first).to_contain_text("(6%)")

    # It had half of that 25 minutes ago.
    began = time.monotonic()
    walk.click(first.get_by_test_id("see-figures"))
    expect(screen["now-adapter"]).to_have_value(HURT[1])
    expect(screen["now-adapter-row"]).to_have_count(2)
    walk.whole("its figures", row(screen, "now-adapter-row", WORST), began=began)
    expect(row(screen, "now-adapter-row", f"{HURT[0]}/{HURT[1]}/v1")).to_contain_text("(2%)")

    # Its release, paused.
    began = time.monotonic()
    walk.click(first.get_by_test_id("see-release"))
    walk.whole("its release", screen["release-pause"], screen["arm"].first, began=began)
    expect(heading).to_have_text(f"Release of {HURT[0]}/{HURT[1]}")
    began = time.monotonic()
    walk.click(screen["release-pause"])
    walk.whole("its release, paused", screen["release-resume"], began=began)
    assert server.plane.services.releases.get(*HURT).run.status == "paused"

    # Its neighbours, of the same tenant.
    began = time.monotonic()
    walk.click(screen["see-figures"])
    neighbour = row(screen, "now-adapter-row", NEXT_TO_IT)
    walk.whole("the tenant's figures", neighbour, screen["now-tenant-row"], began=began)
    expect(neighbour).to_contain_text("20 (2%)")
    began = time.monotonic()
    walk.click(neighbour.get_by_test_id("see-figures"))
    expect(screen["now-adapter-row"]).to_have_count(1)
    walk.whole("the neighbour's figures", neighbour, began=began)

    # A larger budget for them.
    began = time.monotonic()
    walk.click(screen["nav-needs"])
    need = row(screen, "need-row", HURT[0])
    walk.whole("needs", need, began=began)
    began = time.monotonic()
    walk.click(need.get_by_role("link"))
    walk.whole("the tenant's limits", screen["set-token_budget"], screen["usage-row"].first, began=began)
    walk.click(screen["set-token_budget"])
    screen["set-token_budget"].fill(str(2 * BUDGET))
    began = time.monotonic()
    walk.click(screen["tenant-save"])
    expect(screen["budget"]).to_contain_text("of 2,000,000")
    walk.whole("the tenant", screen["tenant-change"], began=began)
    assert server.plane.services.tenants.get(HURT[0]).limits.token_budget == 2 * BUDGET

    print(f"\n{walk.clicks} clicks")
    for name, taken_s in walk.views:
        print(f"{name}: {taken_s:.2f} s")
    assert walk.clicks <= MOST_CLICKS


def test_the_list_leads_to_the_release_of_the_adapter_that_fails(
    server: WholeServer, screen: Screen, browser: Browser
) -> None:
    began = time.monotonic()
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, "all-adapters?sort=errors&order=desc")
    walk = Walk(server, screen, browser)
    first = screen["adapter-row"].first
    walk.whole("the list", first, began=began)
    expect(first).to_have_attribute("data-key", "/".join(HURT))
    walk.click(first.get_by_test_id("see-release"))
    walk.whole("its release", screen["released"], screen["arm"].first, began=began)
    assert walk.clicks == 1
