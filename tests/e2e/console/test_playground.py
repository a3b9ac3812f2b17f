"""What the console has on the data port alone, in a real browser, over a scripted engine: playground and batches."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from sqlalchemy import delete, update

from loraplex.adapters.pooled import Head
from loraplex.control.db.batch_tables import Batch
from loraplex.control.db.tables import AdapterVersion
from support.console.axe import check_axe, need_axe
from support.console.browser import PATIENCE_MS, Screen
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, bearer, whole_server
from support.servers.live_server import free_ports

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        for tenant in ("acme", "quiet"):
            running.plane.make_tenant(tenant)
        yield running


def test_the_base_and_two_versions_answer_side_by_side_with_one_seed(
    server: WholeServer, screen: Screen
) -> None:
    plane = server.plane
    for seed in (1, 2):
        plane.make_adapter("support", seed=seed)
    plane.engine.default = Reply(text="<b>Ahoy</b>, it's 7 o'clock")
    secret = plane.make_key("acme", "inference", "adapters:read")
    screen.sign_in(f"{server.data_url}/console", secret, "playground/support@v1")
    screen["play-add"].click()
    screen["play-model"].nth(2).fill("support@v2")
    screen["play-prompt"].fill("it's")
    screen["play-send"].click()
    for place, served in enumerate(("base", "support@v1", "support@v2")):
        expect(screen["play-answer"].nth(place)).to_have_text("<b>Ahoy</b>, it's 7 o'clock")
        expect(screen["play-status"].nth(place)).to_contain_text(f"stop · {served}")
    asked = plane.engine.requests
    assert {None if one.adapter is None else one.adapter.version for one in asked} == {None, 1, 2}
    assert {one.sampling.seed for one in asked} == {7}
    assert '"model":"support@v2"' in screen.text("play-curl")
    assert "it'\\''s" in screen.text("play-curl"), "a quote of the prompt does not end the shell's"
    assert f'base_url="{server.data_url}/v1"' in screen.text("play-openai")
    assert secret not in screen.page.content()
    # What is printed is what is sent.
    environment = {**os.environ, "LORAPLEX_API_KEY": secret}
    command = ["bash", "-c", screen.text("play-curl")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["choices"][0]["message"]["content"] == "<b>Ahoy</b>, it's 7 o'clock"
    # The page asks all three at once, in whatever order they arrive.
    *by_page, by_curl = plane.engine.requests
    (same,) = (one for one in by_page if one.adapter is not None and one.adapter.version == 2)
    assert (by_curl.prompt_ids, by_curl.sampling, by_curl.adapter) == (
        same.prompt_ids,
        same.sampling,
        same.adapter,
    )


def test_stop_ends_the_stream_and_frees_what_it_held(server: WholeServer, screen: Screen) -> None:
    plane = server.plane
    plane.engine.script(Reply(text="Once upon a time", hold=True, hold_after=4))
    secret = plane.make_key("acme", "inference")
    screen.sign_in(f"{server.data_url}/console", secret, "playground")
    expect(screen["play-model"]).to_have_value(SERVED_NAME)
    screen["play-prompt"].fill("A story")
    screen["play-send"].click()
    expect(screen["play-answer"]).to_have_text("Once")
    screen["play-stop"].click()
    expect(screen["play-status"]).to_contain_text("stopped")
    server.settle()
    assert len(plane.engine.aborted) == 1
    screen["play-model"].fill("nobody-has-this")
    screen["play-again"].click()
    assert "model_not_found" in screen.text("error")


def test_operators_are_told_where_the_playground_is(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(server.admin_url, ADMIN_TOKEN, "playground")
    assert "/console" in screen.text("elsewhere")
    assert screen["elsewhere"].get_by_role("link").count() == 0, "nobody said where browsers reach it"
    expect(screen.page.locator("main")).to_contain_text("--public-url")


@pytest.mark.parametrize("said", [True, False], ids=["behind a proxy", "its own address"])
def test_operators_get_a_link_to_the_playground(tmp_path: Path, screen: Screen, said: bool) -> None:
    data_port, admin_port = free_ports(2)
    settings: dict[str, Any] = {"port": data_port, "admin_port": admin_port}
    public = "https://llm.example.com/loraplex" if said else f"http://127.0.0.1:{data_port}"
    if said:
        settings["public_url"] = f"{public}/"
    # Playwright has the event loop of this thread.
    with ThreadPoolExecutor(1) as elsewhere:
        made = whole_server(tmp_path, **settings)
        elsewhere.submit(made.__enter__).result()
        screen.sign_in(f"http://127.0.0.1:{admin_port}/", ADMIN_TOKEN, "playground")
        link = screen["elsewhere"].get_by_role("link")
        expect(link).to_have_attribute("href", f"{public}/console")
        elsewhere.submit(made.__exit__, None, None, None).result()


def make_head(server: WholeServer, name: str, head: Head) -> None:
    """A version with this head, as the database has it once it is admitted."""
    server.plane.make_adapter(name, seed=len(name))
    of = update(AdapterVersion).where(AdapterVersion.name == name)
    with server.plane.database.write() as session:
        session.execute(of.values(head=head.as_json()))


def test_a_version_that_classifies_shows_its_labels_and_their_probabilities(
    server: WholeServer, screen: Screen
) -> None:
    need_axe()
    labels = ("sad", "<b>glad</b>", "calm")
    make_head(server, "pirate", Head("classify", labels, "single_label_classification"))
    make_head(server, "names", Head("token_classify", ("O", "NAME"), "multi_label_classification"))
    secret = server.plane.make_key("acme", "inference", "adapters:read")
    screen.sign_in(f"{server.data_url}/console", secret, "adapters/pirate")
    expect(screen["pooled"]).to_contain_text("each text")
    expect(screen["pooled"]).to_contain_text("one label (single_label_classification)")
    expect(screen["pooled"]).to_contain_text("<b>glad</b>")
    screen.go("playground/pirate")
    screen["play-model"].first.fill("names@v1")
    expect(screen["play-curl"].locator("..")).to_contain_text(
        "A version that classifies is asked at /v1/classify"
    )
    screen["play-prompt"].fill("sea")
    screen["play-send"].click()
    expect(screen["play-status"].nth(1)).to_contain_text("classified · pirate@v1")
    asked = {"model": "pirate", "input": "sea"}
    answer = server.http.post(f"{server.data_url}/classify", json=asked, headers=bearer(secret)).json()
    probs = sorted(zip(answer["data"][0]["probs"], labels, strict=True), reverse=True)
    expected = [[label, f"{round(100 * prob, 1):g}%"] for prob, label in probs]
    rows = screen["play-answer"].nth(1).get_by_test_id("class-row").all()
    assert [row.inner_text().split() for row in rows] == expected
    tokens = screen["play-answer"].first.get_by_test_id("class-row").all()
    assert [row.inner_text().split()[0] for row in tokens] == ["s", "e", "a"]
    assert "/v1/classify" in screen.text("play-curl")
    assert json.loads(screen.text("play-curl").split("-d '")[1][:-1]) == asked
    expect(screen["play-openai"]).to_have_count(0)
    check_axe(screen, "playground")
    # What a model is asked is known from now on, whatever its column holds.
    screen["play-clear"].click()
    screen["play-prompt"].fill("sky")
    assert "/v1/classify" in screen.text("play-curl")
    expect(screen["play-curl"].locator("..")).not_to_contain_text("A version that classifies")
    screen["play-model"].nth(1).fill(SERVED_NAME)
    assert "/v1/chat/completions" in screen.text("play-curl")


@pytest.fixture
def batches(server: WholeServer) -> Iterator[list[str]]:
    """Three of acme, the newest first: one runs, one waits, one has failed lines and has ended."""
    client, sent = bearer(server.plane.make_key("acme", "inference")), []
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": SERVED_NAME}}
    for _ in range(3):
        files = {"file": ("night.jsonl", json.dumps(line).encode())}
        form = {"purpose": "batch"}
        file = server.http.post(f"{server.data_url}/v1/files", data=form, files=files, headers=client).json()
        body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        made = server.http.post(f"{server.data_url}/v1/batches", json=body, headers=client).json()
        sent.append(made["id"])
    ended = {"status": "completed", "completed": 4_000, "failed": 1_000, "output_file_id": file["id"]}
    with server.plane.database.write() as session:
        for batch, values in ((sent[0], ended), (sent[2], {"completed": 1_200, "failed": 34})):
            session.execute(update(Batch).where(Batch.id == batch).values(total=5_000, **values))
    yield sent[::-1]
    with server.plane.database.write() as session:
        session.execute(delete(Batch))


def test_a_tenant_follows_cancels_and_downloads_its_batches(
    server: WholeServer, screen: Screen, batches: list[str]
) -> None:
    need_axe()
    screen.sign_in(f"{server.data_url}/console", server.plane.make_key("acme", "inference"))
    screen["nav-batches"].click()
    rows = screen["file-row"]
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("1,234 of 5,000, 34 failed")
    expect(rows.nth(2)).to_contain_text("completed")
    bar = rows.nth(0).get_by_role("progressbar", name=f"Lines of {batches[0]}")
    assert bar.evaluate("bar => bar.position") == 1234 / 5000
    screen.page.set_viewport_size({"width": 320, "height": 700})
    check_axe(screen, "batches")
    assert screen.page.evaluate("() => document.documentElement.scrollWidth") <= 320
    with screen.page.expect_download() as saved:
        rows.nth(2).get_by_test_id("batch-answers").click()
    assert b'"custom_id"' in Path(saved.value.path()).read_bytes()
    expect(screen["batch-failures"]).to_have_count(0)
    # The keyboard alone: a question that Escape takes back.
    cancel = rows.nth(0).get_by_role("button", name=f"Cancel {batches[0]}")
    cancel.press("Enter")
    expect(screen.page.get_by_role("dialog")).to_contain_text(f"Cancel the batch {batches[0]} of acme?")
    expect(screen["batch-keep"].first).to_be_focused()
    check_axe(screen, "dialog")
    screen.page.keyboard.press("Escape")
    expect(cancel).to_be_focused()
    expect(rows.nth(0)).to_contain_text("in progress")
    cancel.press("Enter")
    screen.page.keyboard.press("Tab")
    screen.page.keyboard.press("Enter")
    expect(rows.nth(0)).to_contain_text("cancelling")
    expect(rows.nth(1)).to_contain_text("in progress")
    expect(cancel).to_have_count(0)


def test_operators_see_and_cancel_the_batches_of_all_tenants(
    server: WholeServer, screen: Screen, batches: list[str]
) -> None:
    screen.sign_in(server.admin_url, ADMIN_TOKEN)
    screen["nav-batches"].click()
    expect(screen["file-row"]).to_have_count(3)
    expect(screen["batch-answers"]).to_have_count(0)
    screen["file-row"].nth(1).get_by_role("link", name="acme").click()
    expect(screen.page.get_by_role("heading", level=1)).to_have_text("Batches of acme")
    screen["file-row"].nth(1).get_by_test_id("batch-cancel").click()
    screen["batch-cancel-confirm"].and_(screen.page.locator(":visible")).click()
    expect(screen["file-row"].nth(1)).to_contain_text("cancelling")
    screen["tenant"].fill("quiet")
    screen["tenant"].press("Enter")
    expect(screen["empty"]).to_contain_text("loraplex batch submit FILE")
    screen["all-batches"].click()
    expect(screen["file-row"].nth(1)).to_contain_text("cancelling")


def test_a_key_on_the_operators_port_is_told_where_batches_are(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(server.admin_url, server.plane.make_key("acme", "inference"), "batches")
    assert "Batches are made on the data port" in screen.text("elsewhere")
