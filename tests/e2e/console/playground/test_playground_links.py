"""Links that fill the playground in, in a real browser: whole ones, and those that someone made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Route, expect

from support.console.browser import PATIENCE_MS, Screen
from support.console.playground import SHIP, column, last_of, printed, send
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

HURT = "<img src=x onerror='window.hurt=1'>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        for seed in (1, 2):
            running.plane.make_adapter("support", seed=seed)
        yield running
        running.settle()


@pytest.fixture
def secret(server: WholeServer) -> str:
    server.plane.engine.requests.clear()
    server.plane.engine.default = Reply(text="Ahoy")
    return server.plane.make_key("acme", "inference", "adapters:read")


@pytest.fixture
def play(server: WholeServer, screen: Screen, secret: str) -> Screen:
    """The base beside the first version."""
    return screen.sign_in(f"{server.data_url}/console", secret, "playground/support@v1")


def test_a_link_restores_all_but_the_secret_in_another_browser(
    server: WholeServer, play: Screen, secret: str, browser: Browser
) -> None:
    column(play, 1).get_by_test_id("play-model").fill("support@v2")
    play["play-system"].fill("Be <b>brief</b> & kind.")
    play["play-seed"].fill("41")
    play["play-temperature"].fill("0.3")
    play["play-max-tokens"].fill("9")
    play["play-ask-logprobs"].check()
    for part in ("schema", "tools"):
        play[f"play-{part}-part"].click()
    play["play-schema"].fill(json.dumps(SHIP))
    play["play-tools-example"].click()
    play["play-tool-choice"].select_option("none")
    play["play-one-call"].check()
    prompt = "It's 7 o'clock?\n#&=%ü🙂"
    play["play-prompt"].fill(prompt)
    expected = printed(play)
    play["play-share"].click()
    link = play["play-link"].input_value()
    assert secret not in link
    send(play)
    expect(play["play-link"]).to_have_value(link, timeout=PATIENCE_MS)
    asked = len(server.plane.engine.requests)
    with browser.new_context() as other_browser:
        other = Screen(other_browser.new_page())
        other.page.goto(link)
        other.enter(server.plane.make_key("acme", "inference", "adapters:read"))
        expect(other["play-linked"]).to_contain_text("Nothing was sent")
        expect(other["play-problem"]).to_have_count(0)
        expect(other["play-prompt"]).to_have_value(prompt)
        expect(other["play-schema"]).to_be_visible()
        assert [one.input_value() for one in other["play-model"].all()] == ["support@v2", "support@v1"]
        assert printed(other) == expected
        assert not any(url.endswith("/chat/completions") for url in other.urls)
        assert len(server.plane.engine.requests) == asked
        send(other)
        expect(other["play-linked"]).to_have_count(0)
        assert last_of(server, 2).prompt_ids == last_of(server, 1).prompt_ids
        assert other.complaints == []
    # A link has an end: what does not fit is said, and nothing is cut.
    play["play-prompt"].fill("long " * 4000)
    expect(play["play-link-problem"]).to_contain_text("at most 16,000 characters")


def hostile_links() -> dict[str, tuple[str, list[str], list[str]]]:
    """The rest of an address, what the page must say of it, and the columns that it must have."""
    wrong = {
        "seed": "1e9999",
        "temperature": "NaN",
        "max_tokens": "-3",
        "tool_choice": HURT,
        "logprobs": "maybe",
    }
    named = {"__proto__": "1", "constructor": HURT, "prompt": "Hi", "x" * 5000: "1"}
    base = [SERVED_NAME]
    return {
        "wrong types": (
            urlencode(wrong),
            [
                'seed is "1e9999"',
                'temperature is "NaN"',
                'max_tokens is "-3"',
                "must be auto, required, none",
                "maybe",
            ],
            base,
        ),
        "names of a prototype": (
            urlencode(named),
            ['no setting "__proto__"', 'no setting "constructor"', f'"{"x" * 40}…"'],
            base,
        ),
        "models": (
            urlencode([("model", one) for one in ("__proto__", HURT, "toString", "y" * 513, "a", "b")]),
            ["1 to 512 characters", "at most 4 columns"],
            ["__proto__", HURT, "toString", "a"],
        ),
        "twice": (urlencode([("seed", "1"), ("seed", "2")]), ["seed is given 2 times"], base),
        "many": ("&".join(f"a{number}" for number in range(900)), ["And 894 more"], base),
        "no end": ("prompt=" + "%F0" * 300_000, ["900,007 characters", "Nothing of it is used"], base),
        "half characters": ("prompt=%ff%fe&system=%ED%A0%80&model=%00", [], ["\0"]),
    }


@pytest.mark.parametrize("name", hostile_links())
def test_a_hostile_link_is_harmless_and_says_what_is_wrong(
    server: WholeServer, screen: Screen, secret: str, name: str
) -> None:
    link, said, models = hostile_links()[name]
    screen.sign_in(f"{server.data_url}/console", secret, f"tenants/acme/playground?{link}")
    expect(screen["play-linked"]).to_be_visible()
    for one in said:
        expect(screen["play-linked"]).to_contain_text(one)
    if not said:
        expect(screen["play-problem"]).to_have_count(0)
    assert [one.input_value() for one in screen["play-model"].all()] == models
    if said and models == [SERVED_NAME]:
        sampling = {field: printed(screen)[field] for field in ("seed", "temperature", "max_tokens")}
        assert sampling == {"seed": 7, "temperature": 0.7, "max_tokens": 128}
    assert not any("/v1/chat" in url or "/v1/models/" in url for url in screen.urls)
    assert server.plane.engine.requests == []
    assert screen.page.evaluate("window.hurt") is None
    assert screen.page.locator("main img, main script").count() == 0


def test_texts_of_a_link_are_text_and_another_link_replaces_them(
    server: WholeServer, screen: Screen, secret: str
) -> None:
    texts = {"prompt": HURT, "system": HURT, "schema": "[" * 2000 + "]" * 2000, "tools": HURT, "model": HURT}
    place = "tenants/acme/playground?"
    screen.sign_in(f"{server.data_url}/console", secret, place + urlencode(texts))
    for field in ("prompt", "system", "tools", "model"):
        expect(screen[f"play-{field}"]).to_have_value(HURT)
    expect(screen["play-send"]).to_be_disabled()
    expect(screen["play-schema-problem"]).to_contain_text("deeper than 100 levels")
    expect(screen["play-tools-problem"]).to_contain_text("cannot be read as JSON")
    for field in ("schema", "tools"):
        screen[f"play-{field}"].fill("")
    send(screen)
    expect(screen["error"]).to_contain_text(HURT)
    expect(screen["play-said"]).to_have_text(HURT)
    assert screen.page.evaluate("window.hurt") is None
    assert screen.page.locator("main img").count() == 0
    screen.go(place + urlencode({"prompt": "calm"}))
    expect(screen["play-prompt"]).to_have_value("calm")
    expect(screen["play-turn"]).to_have_count(0)
    assert server.plane.engine.requests == []


def test_on_the_admin_port_a_link_leads_to_the_same_on_the_data_port(
    server: WholeServer, screen: Screen
) -> None:
    def told(route: Route) -> None:
        """As with the setting `public_url`."""
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"data_url": server.data_url})

    screen.page.route("**/caller", told)
    place = "tenants/acme/playground?" + urlencode({"prompt": "Who's there?", "seed": "41"})
    screen.sign_in(f"{server.admin_url}/", ADMIN_TOKEN, place)
    link = screen["elsewhere"].get_by_role("link")
    expect(link).to_have_attribute("href", f"{server.data_url}/console#/{place}")
