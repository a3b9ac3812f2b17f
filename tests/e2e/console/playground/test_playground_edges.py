"""The edges of the playground in a real browser: keys past a disabled button, removed columns, answers that
break off, and figures without measure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from support.console.browser import PATIENCE_MS, Screen
from support.console.playground import column, printed, send
from support.engine.fake_engine import Reply
from support.http.admin_plane import SERVED_NAME
from support.http.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)

CHAT = "**/v1/chat/completions"
CALL = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": "{}"}}
FAILURE = {"error": {"code": "engine_failed", "message": "The engine failed."}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
        running.plane.make_adapter("support", seed=1)
        yield running
        running.settle()


@pytest.fixture
def play(server: WholeServer, screen: Screen) -> Screen:
    """The base beside the first version."""
    server.plane.engine.requests.clear()
    server.plane.engine.default = Reply(text="Ahoy")
    secret = server.plane.make_key("acme", "inference", "adapters:read")
    return screen.sign_in(f"{server.data_url}/console", secret, "playground/support@v1")


def delta(finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish, "logprobs": logprobs}]}


def scored(texts: str, logprob: float = -0.5) -> dict[str, Any]:
    """A token for each character."""
    return {"content": [{"token": text, "logprob": logprob, "top_logprobs": []} for text in texts]}


def answer_with(screen: Screen, documents: dict[str, list[dict[str, Any]]]) -> None:
    """From now on each model's stream is these documents, and then ends."""

    def answered(route: Route) -> None:
        told = documents[json.loads(route.request.post_data or "")["model"]]
        body = "".join(f"data: {json.dumps(document)}\n\n" for document in told)
        route.fulfill(body=body, headers={"content-type": "text/event-stream"})

    screen.page.unroute(CHAT)
    screen.page.route(CHAT, answered)


def chats(screen: Screen) -> int:
    """How many requests the page has sent for an answer."""
    return sum(url.endswith("/v1/chat/completions") for url in screen.urls)


def test_the_keyboard_sends_nothing_while_answers_come(server: WholeServer, play: Screen) -> None:
    engine = server.plane.engine
    engine.script(*[Reply(text="Once upon a time", hold=True, hold_after=4)] * 2)
    aborted = len(engine.aborted)
    prompt = play["play-prompt"]
    prompt.fill("A story")
    prompt.press("Control+Enter")
    expect(play["play-answer"]).to_have_text(["Once", "Once"])
    prompt.fill("Another")
    for _ in range(2):
        prompt.press("Control+Enter")
    for name in ("send", "again", "clear", "add"):
        expect(play[f"play-{name}"]).to_be_disabled()
    for number in (1, 2):
        expect(play.page.get_by_label(f"Remove column {number}")).to_be_disabled()
    play["play-stop"].click()
    expect(play["play-stop"]).to_be_disabled()
    server.settle()
    expect(play["play-said"]).to_have_text(["A story", "A story"])
    expect(play["play-status"].first).to_contain_text("stopped")
    expect(prompt).to_have_value("Another")
    assert (len(engine.aborted) - aborted, chats(play)) == (2, 2)
    # Once they have ended the keyboard sends again.
    prompt.press("Control+Enter")
    expect(column(play, 2).get_by_test_id("play-answer")).to_have_text(["Once", "Ahoy"])


def test_the_keyboard_sends_nothing_without_the_schema_that_is_typed(play: Screen) -> None:
    play["play-schema-part"].click()
    play["play-schema"].fill("{age:")
    expect(play["play-send"]).to_be_disabled()
    play["play-prompt"].fill("How old?")
    play["play-prompt"].press("Control+Enter")
    expect(play["play-prompt"]).to_have_value("How old?")
    play["play-schema"].fill("")
    send(play)
    expect(play["play-turn"]).to_have_count(2)
    assert chats(play) == 2


def test_a_column_is_removed_with_its_own_tokens(play: Screen) -> None:
    long = delta("stop", scored("Ahoy there"), content="Ahoy there")
    short = delta("stop", scored("Aye"), content="Aye")
    answer_with(play, {SERVED_NAME: [long], "support@v1": [short]})
    play["play-ask-logprobs"].check()
    send(play, "Sail")
    column(play, 1).get_by_test_id("play-token").last.click()
    column(play, 2).get_by_test_id("play-token").nth(1).click()
    play.page.get_by_label("Remove column 1").click()
    expect(play["play-token"]).to_have_text(list("Aye"))
    expect(play["play-likely"].get_by_role("region")).to_have_attribute(
        "aria-label", 'Likeliest tokens in place of "y"'
    )
    expect(column(play, 1).get_by_test_id("play-model")).to_have_value("support@v1")
    # What is added after it has a life of its own.
    play["play-add"].click()
    expect(column(play, 2).get_by_test_id("play-likely")).to_have_count(0)


def test_an_answer_that_failed_half_way_is_no_part_of_the_conversation(play: Screen) -> None:
    play["play-tools-part"].click()
    play["play-tools-example"].click()
    play.page.get_by_label("Remove column 2").click()
    answer_with(play, {SERVED_NAME: [delta("tool_calls", tool_calls=[CALL])]})
    send(play, "How is the weather?")
    play["play-result"].fill("fog")
    answer_with(play, {SERVED_NAME: [delta(content="It is "), FAILURE]})
    send(play, "And?")
    expect(play["error"]).to_contain_text("The engine failed.")
    expect(play["play-answer"].last).to_have_text("It is ")
    # The result goes with the turn that takes its place.
    expect(play["play-result"]).to_have_value("fog")
    play["play-prompt"].fill("So?")
    messages = printed(play)["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "user"]
    assert (messages[2]["content"], messages[3]["content"]) == ("fog", "So?")
    answer_with(play, {SERVED_NAME: [delta("stop", content="Foggy")]})
    send(play)
    expect(play["play-said"]).to_have_text(["How is the weather?", "So?"])
    expect(play["play-result"]).to_have_count(0)


def test_a_stream_without_an_end_is_a_failure(play: Screen) -> None:
    answer_with(
        play, {SERVED_NAME: [delta(content="Once upon")], "support@v1": [delta("stop", content="Aye")]}
    )
    send(play, "A story")
    expect(column(play, 1).get_by_test_id("error")).to_contain_text("closed before the answer was whole")
    expect(column(play, 1).get_by_test_id("play-status")).to_contain_text("failed")
    expect(column(play, 1).get_by_test_id("play-answer")).to_have_text("Once upon")
    expect(column(play, 2).get_by_test_id("error")).to_have_count(0)


def test_a_figure_without_measure_is_short(play: Screen) -> None:
    unlikely = delta("stop", scored("A", -1.234e300), content="A")
    overdone = delta("stop", scored("A", 600), content="A")
    answer_with(play, {SERVED_NAME: [unlikely], "support@v1": [overdone]})
    play["play-ask-logprobs"].check()
    send(play, "Sail")
    label = '"A", log probability -1.23E300, 0%'
    expect(column(play, 1).get_by_test_id("play-token")).to_have_attribute("aria-label", label)
    label = '"A", log probability 600, 3.77E262%'
    expect(column(play, 2).get_by_test_id("play-token")).to_have_attribute("aria-label", label)
