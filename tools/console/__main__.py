"""Takes pictures of every page of the console, at three widths and in both themes.

make console        # into build/console; those of docs/console.md into docs/images. Needs Debian's package chromium
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from support.console.browser import chromium
from support.servers.live_server import EXAMPLE_ADAPTERS
from tools.console.seeding import Seeded, busy_server, real_server

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/console"
IMAGES = ROOT / "docs/images"
WIDTHS = (320, 768, 1280)
THEMES = ("light", "dark")
IN_DOCS = {"now": "dark", "adapter": "light", "release": "light", "playground": "dark"}
"""Pages of docs/console.md with the theme that they are shown in."""
DOCS_WIDTH, DOCS_HEIGHT, DOCS_COLORS = 1280, 860, 200
MAX_BYTES = 300_000
ANSWERS_BEFORE_RELEASE, ANSWERS_BEFORE_PICTURES = 100, 400

BUSY: Sequence[tuple[str, str, str]] = (
    ("adapters", "tenants/acme/adapters", "[data-testid=adapter-row]"),
    ("all-adapters", "all-adapters", "[data-testid=adapter-row]"),
    ("needs", "needs", "[data-testid=need-row], [data-testid=empty]"),
    ("release", "tenants/acme/adapters/support/release", "[data-testid=guard-verdict]"),
    ("tenant", "tenants/acme", "[data-testid=key-row]"),
    ("batches", "all-batches", "[data-testid=file-row]"),
    ("audit", "audit", "[data-testid=audit-row]"),
    ("now", "now", "[data-testid=now-adapter-row]"),
)
"""Pages of the busy server: a name, its place, and what is there once it is whole."""


def sign_in(page: Page, url: str, secret: str) -> None:
    page.goto(url)
    page.get_by_test_id("secret").fill(secret)
    page.get_by_test_id("sign-in").click()
    page.get_by_test_id("sign-out").wait_for()


def go(page: Page, place: str, shown: str) -> None:
    page.evaluate("place => { location.hash = '#/' + place }", place)
    page.locator(shown).first.wait_for()
    page.get_by_test_id("loading").first.wait_for(state="detached")


def take(page: Page, name: str, shown: str = "main") -> None:
    """All pictures of the page that is shown, each while `shown` is there: rows of what runs come and go."""
    for theme in THEMES:
        page.get_by_test_id("theme").select_option(theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": DOCS_HEIGHT})
            page.locator(shown).first.wait_for()
            page.screenshot(path=FOLDER / f"{name}-{theme}-{width}.png", full_page=True)
            if width == DOCS_WIDTH and IN_DOCS.get(name) == theme:
                save_for_docs(page.screenshot(), name)


def save_for_docs(png: bytes, name: str) -> None:
    colors = Image.open(io.BytesIO(png)).convert("RGB").quantize(DOCS_COLORS, dither=Image.Dither.NONE)
    colors.save(IMAGES / f"console-{name}.png", optimize=True)


def take_busy(page: Page, seeded: Seeded) -> None:
    page.goto(seeded.server.admin_url)
    page.screenshot(path=FOLDER / "sign-in-light-1280.png")
    sign_in(page, seeded.server.admin_url, seeded.server.admin_token)
    for name, place, shown in BUSY:
        go(page, place, shown)
        take(page, name, shown)


def take_real(page: Page, seeded: Seeded) -> None:
    sign_in(page, seeded.server.admin_url, seeded.server.admin_token)
    go(page, "tenants/acme/adapters/support", "[data-testid=report]")
    page.get_by_test_id("tags-change").click()
    page.get_by_test_id("tags-input").fill("eu team-a")
    page.get_by_test_id("tags-save").click()
    take(page, "adapter", "[data-testid=tag]")
    go(page, "tenants/acme/upload", "[data-testid=upload]")
    page.get_by_test_id("adapter-name").fill("answers-in-json")
    page.get_by_test_id("upload").set_input_files(sorted((EXAMPLE_ADAPTERS / "json").glob("adapter_*")))
    page.get_by_test_id("upload-send").click()
    page.get_by_test_id("uploaded").wait_for()
    take(page, "upload")
    sign_in(page, f"{seeded.server.data_url}/console", seeded.keys["acme"])
    go(page, "tenants/acme/playground/support@v1", "[data-testid=play-prompt]")
    page.get_by_test_id("play-add").click()
    page.get_by_test_id("play-model").nth(2).fill("support@v2")
    page.get_by_test_id("play-system").fill("You are the mate of a ship. Answer in one sentence.")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Temperature").fill("0")
    page.get_by_test_id("play-ask-logprobs").check()
    for prompt in ("What do you think of the sea?", "And of the harbour?"):
        page.get_by_test_id("play-prompt").fill(prompt)
        page.get_by_test_id("play-send").click()
        page.locator("[data-testid=play-again]:enabled").wait_for()
    take(page, "playground")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page(timezone_id="UTC", locale="en-GB")
        page.set_default_timeout(120_000)
        with busy_server() as seeded:
            seeded.wait_answers(ANSWERS_BEFORE_RELEASE)
            seeded.begin_release()
            seeded.begin_batch()
            seeded.wait_answers(ANSWERS_BEFORE_PICTURES)
            seeded.wait_last_use()
            take_busy(page, seeded)
        with real_server() as seeded:
            take_real(page, seeded)
    size = sum((IMAGES / f"console-{name}.png").stat().st_size for name in IN_DOCS)
    assert size <= MAX_BYTES, f"the pictures of docs/console.md have {size} bytes"


if __name__ == "__main__":
    main()
