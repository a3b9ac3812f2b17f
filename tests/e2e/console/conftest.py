"""A browser for each file: Playwright holds the thread's event loop, which other files need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from support.console.browser import Screen, chromium
from support.http.quiet import errors_alone


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with errors_alone():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def screen(browser: Browser) -> Iterator[Screen]:
    """A tab of its own, which must have found nothing to complain about and asked no foreign origin."""
    with browser.new_context() as context:
        made = Screen(context.new_page())
        yield made
        made.page.unroute_all(behavior="ignoreErrors")  # a reading may be under way
        assert made.complaints == []
        origins = {
            "/".join(url.split("/")[:3]) for url in made.urls if not url.startswith(("data:", "blob:"))
        }
        assert len(origins) <= 1, origins
        assert context.cookies() == []
        kept = "() => Object.keys(localStorage).length + Object.keys(sessionStorage).length"
        assert made.page.url == "about:blank" or made.page.evaluate(kept) == 0
