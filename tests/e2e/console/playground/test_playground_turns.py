"""Conversations of the playground in a real browser, over a scripted engine: turns, forms of answers, tools, log
probabilities and versions of a list."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.console.playground import SHIP, column, in_python, last_of, printed, send
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.models.byte_tokenizer import byte_decode
from support.models.matching import takes

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

CALL = '{"name": "get_weather", "arguments": {"city": "Lima"}}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in ("acme", "tight"):
            running.plane.make_tenant(tenant)
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


def test_a_second_turn_has_the_first_one_of_its_own_column_before_it(
    server: WholeServer, play: Screen, secret: str
) -> None:
    engine = server.plane.engine
    play["play-system"].fill("Be brief.")
    send(play, "Who are you?")
    first = {version: last_of(server, version) for version in (None, 1)}
    engine.default = Reply(text="It's <b>me</b>")
    send(play, "And now?")
    for number, version in ((1, None), (2, 1)):
        shown = column(play, number)
        expect(shown.get_by_test_id("play-said")).to_have_text(["Who are you?", "And now?"])
        expect(shown.get_by_test_id("play-answer")).to_have_text(["Ahoy", "It's <b>me</b>"])
        begin = "system\nBe brief.\nuser\nWho are you?\nassistant\n"
        assert byte_decode(first[version].prompt_ids) == begin
        asked = last_of(server, version)
        assert byte_decode(asked.prompt_ids) == f"{begin}Ahoy\nuser\nAnd now?\nassistant\n"
        assert asked.sampling.seed == 7
    expect(play["play-prompt"]).to_have_value("")
    # What is printed is the last request, in both languages; once a turn is typed, the next one.
    body = printed(play)
    assert [one["role"] for one in body["messages"]] == ["system", "user", "assistant", "user"]
    assert in_python(play) == body
    play["play-prompt"].fill("And then?")
    assert printed(play)["messages"][-2:] == [
        {"role": "assistant", "content": "It's <b>me</b>"},
        {"role": "user", "content": "And then?"},
    ]
    assert secret not in play.page.content()
    # The last turn again, by another version in the second column.
    column(play, 2).get_by_test_id("play-list").select_option("support@v2")
    play["play-again"].click()
    expect(column(play, 2).get_by_test_id("play-status").last).to_contain_text("stop · support@v2")
    assert last_of(server, 2).prompt_ids == last_of(server, 1).prompt_ids
    expect(column(play, 2).get_by_test_id("play-turn")).to_have_count(2)
    expect(play["play-prompt"]).to_have_value("And then?")
    play["play-clear"].click()
    expect(play["play-turn"]).to_have_count(0)


def test_stop_in_a_second_turn_keeps_the_first(server: WholeServer, play: Screen) -> None:
    engine = server.plane.engine
    send(play, "A story")
    engine.script(*[Reply(text="Once upon a time", hold=True, hold_after=4)] * 2)
    aborted = len(engine.aborted)
    play["play-prompt"].fill("Another")
    play["play-prompt"].press("Control+Enter")
    for number in (1, 2):
        expect(column(play, number).get_by_test_id("play-answer")).to_have_text(["Ahoy", "Once"])
    play["play-stop"].click()
    for number in (1, 2):
        expect(column(play, number).get_by_test_id("play-status").last).to_contain_text("stopped")
    server.settle()
    assert len(engine.aborted) == aborted + 2
    send(play, "Go on")
    expect(column(play, 1).get_by_test_id("play-answer")).to_have_text(["Ahoy", "Once", "Ahoy"])
    assert "Another\nassistant\nOnce\nuser\nGo on" in byte_decode(last_of(server, 1).prompt_ids)


def test_an_answer_has_the_form_of_a_schema(server: WholeServer, play: Screen) -> None:
    engine = server.plane.engine
    play["play-schema-part"].click()
    play["play-prompt"].fill("How old?")
    play["play-schema"].fill("{age:")
    expect(play["play-schema-problem"]).to_contain_text("cannot be read as JSON")
    expect(play["play-send"]).to_be_disabled()
    play["play-schema"].fill("[" * 200 + "]" * 200)
    expect(play["play-schema-problem"]).to_contain_text("deeper than 100 levels")
    # What the server refuses is said in its words at each column.
    play["play-schema"].fill(json.dumps(SHIP | {"minContains": 1, "uniqueItems": True}))
    send(play)
    expect(column(play, 2).get_by_test_id("error")).to_contain_text("'uniqueItems' is not supported")
    assert engine.requests == []
    play["play-schema"].fill(json.dumps(SHIP))
    engine.default = Reply(text='{"age": 30}')
    play["play-again"].click()
    for number, version in ((1, None), (2, 1)):
        shown = column(play, number)
        expect(shown.get_by_test_id("play-status")).to_contain_text("whole JSON")
        assert json.loads(shown.get_by_test_id("play-answer").inner_text()) == {"age": 30}
        grammar = last_of(server, version).grammar
        assert grammar is not None
        assert takes(grammar, '{"age": 30}')
        assert not takes(grammar, '{"name": 30}')
    play.page.get_by_label("Most tokens").fill("5")
    play["play-again"].click()
    expect(column(play, 2).get_by_test_id("play-status")).to_contain_text("no whole JSON")


def test_a_call_is_shown_and_its_result_is_the_next_turn(server: WholeServer, play: Screen) -> None:
    engine = server.plane.engine
    play["play-tools-part"].click()
    play["play-tools-example"].click()
    play["play-tool-choice"].select_option("required")
    play["play-one-call"].check()
    engine.script(*[Reply(text=CALL)] * 2)
    send(play, "How is the weather?")
    for number in (1, 2):
        expect(column(play, number).get_by_test_id("play-call")).to_contain_text("Calls get_weather with")
        expect(column(play, number).get_by_test_id("play-call").locator("pre")).to_have_text(
            '{"city": "Lima"}'
        )
        expect(column(play, number).get_by_test_id("play-status")).to_contain_text("tool_calls")
    body = printed(play)
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert in_python(play) == body
    expect(play["play-send"]).to_be_disabled()
    play["play-tool-choice"].select_option("auto")
    column(play, 2).get_by_label("Result of get_weather").fill('{"sky": "<b>fog</b>"}')
    send(play)
    # The other column has no result, and nothing was said to it.
    expect(column(play, 1).get_by_test_id("play-turn")).to_have_count(1)
    shown = column(play, 2)
    expect(shown.get_by_test_id("play-told")).to_contain_text('{"sky": "<b>fog</b>"}')
    expect(shown.get_by_test_id("play-answer").last).to_have_text("Ahoy")
    expect(shown.get_by_test_id("play-result")).to_have_count(0)
    asked = byte_decode(last_of(server, 1).prompt_ids)
    assert 'assistant\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n' in asked
    assert '{"sky": "<b>fog</b>"}' in asked
    call, result = printed(play)["messages"][-2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (result["role"], result["content"]) == ("tool", '{"sky": "<b>fog</b>"}')


def test_log_probabilities_are_read_token_by_token(server: WholeServer, play: Screen, secret: str) -> None:
    need_axe()
    play["play-ask-logprobs"].check()
    play.page.get_by_label("Temperature").fill("0")
    send(play, "Sail")
    shown = column(play, 2)
    tokens = shown.get_by_test_id("play-token")
    expect(tokens).to_have_text(list("Ahoy"))
    url, body = f"{server.data_url}/v1/chat/completions", printed(play)
    answer = server.http.post(url, json=body, headers=bearer(secret)).json()
    told = answer["choices"][0]["logprobs"]["content"]
    labels = [str(one.get_attribute("aria-label")) for one in tokens.all()]
    for one, label in zip(told, labels, strict=True):
        assert label.startswith(f'"{one["token"]}", log probability {one["logprob"]:.3g}')
    least = min(told, key=lambda one: one["logprob"])
    expect(shown.get_by_test_id("play-logprobs")).to_contain_text(f'"{least["token"]}"')
    classes = {str(one.get_attribute("class")) for one in tokens.all()}
    assert len(classes) > 1, "a likely token has another line than an unlikely one"
    # The keyboard alone: one stop of Tab for all tokens, arrows within.
    tokens.first.focus()
    play.page.keyboard.press("End")
    play.page.keyboard.press("ArrowLeft")
    expect(tokens.nth(2)).to_be_focused()
    assert [one.get_attribute("tabindex") for one in tokens.all()] == ["-1", "-1", "0", "-1"]
    rows = shown.get_by_test_id("play-likely-row")
    expect(rows).to_have_count(len(told[2]["top_logprobs"]))
    expect(rows.first).to_contain_text("(drawn)")
    tokens.nth(1).click()
    expect(shown.get_by_test_id("play-likely").get_by_role("region")).to_have_attribute(
        "aria-label", 'Likeliest tokens in place of "h"'
    )
    for part in ("schema", "tools"):
        play[f"play-{part}-part"].click()
    play["play-share"].click()
    for width, theme in ((320, "light"), (320, "dark"), (1280, "light"), (1280, "dark")):
        play.page.set_viewport_size({"width": width, "height": 900})
        play["theme"].select_option(theme)
        check_axe(play, f"playground {theme} {width}")
        assert play.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert spans(play)[0][0] == spans(play)[1][0], "side by side"
    play.page.set_viewport_size({"width": 320, "height": 900})
    assert spans(play)[0][1] <= spans(play)[1][0], "stacked"


def spans(screen: Screen) -> list[tuple[float, float]]:
    """Where the two columns begin and end, from above, in pixels."""
    where = "one => [one.getBoundingClientRect().top, one.getBoundingClientRect().bottom]"
    return [tuple(column(screen, number).evaluate(where)) for number in (1, 2)]


def test_a_version_is_chosen_from_the_list(server: WholeServer, screen: Screen, secret: str) -> None:
    screen.sign_in(f"{server.data_url}/console", secret, "playground")
    chosen = screen["play-list"]
    expect(chosen).to_have_value(SERVED_NAME)
    chosen.select_option("support")
    expect(screen["play-model"]).to_have_value("support")
    versions = chosen.locator("optgroup[label='Versions of support'] option")
    expect(versions).to_have_count(2)
    assert [str(one.text_content()).split()[0] for one in versions.all()] == ["support@v2", "support@v1"]
    chosen.select_option("support@v2")
    send(screen, "Hi")
    expect(screen["play-status"]).to_contain_text("stop · support@v2")
    screen["play-model"].fill("support@v9")
    expect(chosen).to_have_value("")
    screen["sign-out"].click()
    screen.enter(server.plane.make_key("acme", "inference"))
    screen["play-model"].fill("support")
    expect(chosen.locator("optgroup").last).to_contain_text("keys with adapters:read")


def test_what_the_server_refuses_is_said_at_the_column(server: WholeServer, screen: Screen) -> None:
    limits = {"limits": {"requests_per_minute": 1}}
    url = f"{server.admin_url}/admin/v1/tenants/tight"
    assert server.http.patch(url, json=limits, headers=bearer(ADMIN_TOKEN)).status_code == 200
    screen.sign_in(f"{server.data_url}/console", server.plane.make_key("tight", "inference"), "playground")
    screen.page.get_by_label("Most tokens").fill("1000000")
    send(screen, "Hi")
    expect(screen["error"]).to_contain_text("tokens")
    expect(screen["play-status"]).to_contain_text("failed")
    screen.page.get_by_label("Most tokens").fill("8")
    for _ in range(3):
        screen["play-again"].click()
        expect(screen["play-stop"]).to_be_disabled()
    expect(screen["error"]).to_contain_text("try again in")
    expect(screen["error"]).to_contain_text("rate_limit_exceeded")
    # A turn that failed is no part of the conversation.
    screen["play-prompt"].fill("Hello")
    assert [one["content"] for one in printed(screen)["messages"]] == ["Hello"]
