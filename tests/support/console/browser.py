"""A real Chromium that shows the console: Debian's package `chromium`, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

INSTALL = "apt-get install --no-install-recommends chromium fonts-dejavu"
PATIENCE_MS = 60_000
"""How long a test waits for what must come; a busy machine takes its time."""


def need_chromium() -> str:
    """The browser's program. Skips the test where it is missing; fails it in CI, where it must not be."""
    program = shutil.which("chromium")
    if program is None:
        message = f"chromium is not installed: {INSTALL}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return program


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the block ends. Meanwhile no event loop can run in this thread: Playwright's own does."""
    arguments = ["--no-sandbox"]  # the tests of CI run as root
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=need_chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Screen:
    """A tab with the console. `urls` are all that it asked for, `complaints` what the browser said of the page: errors
    of scripts and of the content security policy."""

    page: Page
    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)

    def _note(self, message: Any) -> None:
        # Of an answer that is no success, which a test may be about, the browser says this by itself.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def __getitem__(self, testid: str) -> Locator:
        return self.page.get_by_test_id(testid)

    def sign_in(self, url: str, secret: str, at: str = "") -> Screen:
        """Open the console at `url` (its page's address) and sign in; `at` is the place after `#/`."""
        self.page.goto(f"{url}#/{at}" if at else url)
        return self.enter(secret)

    def enter(self, secret: str) -> Screen:
        """Sign in where the console asks for the secret."""
        self["secret"].fill(secret)
        self["sign-in"].click()
        self["who"].wait_for()
        return self

    def with_clock(self) -> Screen:
        """The page's clock can be put on from now on: before the sign-in."""
        self.page.clock.install()
        return self

    def pass_time(self, seconds: float) -> Screen:
        """What the page does within that time, such as a repeated reading, is due at once. Needs `with_clock`."""
        self.page.clock.fast_forward(int(1000 * seconds))
        return self

    def go(self, at: str) -> Screen:
        """To another page of the console, as a link does."""
        self.page.evaluate("place => { location.hash = place }", f"#/{at}")
        return self

    def text(self, testid: str) -> str:
        return self[testid].first.inner_text()
