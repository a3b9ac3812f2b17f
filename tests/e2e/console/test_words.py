"""Words of this server are explained on the pages where they stand, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.http.admin_plane import ADMIN_TOKEN
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

WORDS = {
    "now": {"place": "Room for one sequence"},
    "all-adapters": {"tier": "the device is the fastest", "pin": "keep it there"},
    "tenants/acme": {"reserve": "most recently used adapters"},
    "tenants/acme/adapters/support": {"tier": "the device is the fastest", "pin": "keep it there"},
    "tenants/acme/adapters/support/release": {
        "hold": "no verdict yet",
        "evidence": "It begins at 1",
        "sticky": "stays with one version",
        "step": "A part of a schedule",
    },
}
"""What each page explains, by its place, with some of what it says."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        running.plane.make_adapter("support")
        yield running


@pytest.mark.parametrize("place", WORDS)
def test_a_key_or_a_touch_explains_a_word_where_it_stands(
    server: WholeServer, screen: Screen, place: str
) -> None:
    need_axe()
    screen.page.set_viewport_size({"width": 320, "height": 700})
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, place)
    expect(screen["word"]).to_have_text(list(WORDS[place]))
    expect(screen["meaning"]).to_be_hidden()
    for word, said in WORDS[place].items():
        button = screen["word"].filter(has_text=word)
        button.press("Enter")
        expect(button).to_have_attribute("aria-expanded", "true")
        expect(button).to_be_focused()
        expect(screen["meaning"]).to_contain_text(said)
    check_axe(screen, place)
    assert screen.page.evaluate("() => document.documentElement.scrollWidth") <= 320
    screen["word"].last.click()
    expect(screen["meaning"]).to_be_hidden()
    expect(screen["word"].last).to_have_attribute("aria-expanded", "false")
