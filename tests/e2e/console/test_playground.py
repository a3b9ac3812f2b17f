"""The playground, in a real browser on the data port of a server with a scripted engine."""

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

from support.console.browser import PATIENCE_MS, Screen
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME
from support.http.whole_server import WholeServer, whole_server
from support.servers.live_server import free_ports

pytestmark = pytest.mark.slow
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        running.plane.make_tenant("acme")
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
    screen["play-send"].click()
    assert "model_not_found" in screen.text("error")


def test_operators_are_told_where_the_playground_is(server: WholeServer, screen: Screen) -> None:
    screen.sign_in(server.admin_url, ADMIN_TOKEN, "playground")
    assert "/console" in screen.text("play-elsewhere")
    assert screen["play-elsewhere"].get_by_role("link").count() == 0, "nobody said where browsers reach it"
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
        link = screen["play-elsewhere"].get_by_role("link")
        expect(link).to_have_attribute("href", f"{public}/console")
        elsewhere.submit(made.__exit__, None, None, None).result()
