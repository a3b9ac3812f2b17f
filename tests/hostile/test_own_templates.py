"""Chats by versions' own templates over both ports: what they change, and what they cannot do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loraplex.serving.forks.messages import JobDone
from loraplex.serving.forks.process import ForkProcess
from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, adapter_files
from support.http.whole_server import WholeServer, bearer, whole_server
from support.models.byte_tokenizer import CHAT_TEMPLATE, START_ID, byte_decode

MESSAGES = [{"role": "user", "content": "hi"}]
ALPACA = "### Instruction:\n{{ messages[-1].content }}\n### Response:\n"
BUSY = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"
ENDS = {"generation_config.json": json.dumps({"eos_token_id": [START_ID, 5000]}).encode()}


class Server:
    """`own` of tenants acme and rival: their adapter `plain` brings nothing."""

    def __init__(self, server: WholeServer, files: dict[str, tuple[str, bytes]]) -> None:
        self.server = server
        self.files = files
        self.keys = {}
        for tenant in ("acme", "rival"):
            server.plane.make_tenant(tenant)
            self.keys[tenant] = bearer(server.plane.make_key(tenant, "inference", "adapters:write"))
            self.push("plain", tenant=tenant)

    def push(self, name: str, tenant: str = "acme", **files: bytes) -> httpx.Response:
        sent = self.files | {part: (part, data) for part, data in files.items()}
        path = f"{self.server.admin_url}/admin/v1/tenants/{tenant}/adapters/{name}/versions"
        return self.server.http.post(path, files=sent, headers=bearer(ADMIN_TOKEN))

    def template(self, name: str, template: str, **files: bytes) -> httpx.Response:
        return self.push(name, **{"chat_template.jinja": template.encode()}, **files)

    def post(self, path: str, model: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": MESSAGES} | fields
        return self.server.http.post(f"{self.server.data_url}{path}", json=body, headers=self.keys[tenant])

    def chat(self, model: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", model, tenant, **fields)

    def tokens(self, model: str, **fields: Any) -> str:
        answer = self.post("/tokenize", model, **fields)
        assert answer.status_code == 200, answer.text
        return byte_decode(answer.json()["tokens"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bytes]]:
    return adapter_files(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[str, bytes]]) -> Iterator[Server]:
    with whole_server(tmp_path_factory.mktemp("own"), adapter_templates="own") as server:
        yield Server(server, files)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[str, bytes]]) -> Iterator[Server]:
    with whole_server(tmp_path_factory.mktemp("base")) as server:
        yield Server(server, files)


def test_own_template_renders_the_versions_chats_and_no_others(own: Server) -> None:
    made = own.template("alpaca", ALPACA)
    assert made.status_code == 201
    checks = {check["name"]: check for check in made.json()["report"]["checks"]}
    assert checks["chat template"]["ok"]
    rendered = "### Instruction:\nhi\n### Response:"  # Jinja drops the last newline of a template
    assert own.tokens("alpaca") == rendered
    assert own.tokens("plain") == "user\nhi\nassistant\n"
    assert own.chat("alpaca").status_code == 200
    (asked,) = own.server.plane.engine.requests[-1:]
    assert byte_decode(asked.prompt_ids) == rendered
    counted = own.post("/v1/messages/count_tokens", "alpaca")
    assert counted.json() == {"input_tokens": len(rendered)}
    responses = own.server.http.post(
        f"{own.server.data_url}/v1/responses",
        json={"model": "alpaca", "input": "hi", "store": False},
        headers=own.keys["acme"],
    )
    assert responses.status_code == 200, responses.text
    assert byte_decode(own.server.plane.engine.requests[-1].prompt_ids) == rendered


def test_base_renders_all_chats_by_default(base: Server) -> None:
    made = base.template("alpaca", ALPACA, **ENDS)
    assert "--adapter-templates own" in made.text
    assert base.tokens("alpaca") == base.tokens("plain") == "user\nhi\nassistant\n"
    base.chat("alpaca")
    assert base.server.plane.engine.requests[-1].sampling.stop_token_ids == ()


def test_own_ends_end_answers(own: Server) -> None:
    assert own.push("ends", **ENDS).status_code == 201
    own.server.plane.engine.script(Reply(text="hello"))
    answer = own.chat("ends", stop_token_ids=[7])
    assert answer.status_code == 200, answer.text
    assert own.server.plane.engine.requests[-1].sampling.stop_token_ids == (7, START_ID)
    own.chat("ends", ignore_eos=True)
    assert own.server.plane.engine.requests[-1].sampling.stop_token_ids == ()
    own.chat("plain")
    assert own.server.plane.engine.requests[-1].sampling.stop_token_ids == ()
    assert own.tokens("ends") == own.tokens("plain")


def test_the_fingerprint_tells_templates_apart(own: Server, base: Server) -> None:
    prints = {}
    for server, kind in ((own, "own"), (base, "base")):
        for name, template in (("one", ALPACA), ("two", ALPACA + " ")):
            server.template(name, template)
            prints[kind, name] = server.chat(name).headers["x-loraplex-fingerprint"]
        prints[kind, "plain"] = server.chat("plain").headers["x-loraplex-fingerprint"]
    assert len({prints["own", name] for name in ("one", "two", "plain")}) == 3
    assert len({prints["base", name] for name in ("one", "two", "plain")}) == 1
    assert prints["own", "plain"] == prints["base", "plain"]


def test_a_template_that_does_not_compile(own: Server, base: Server) -> None:
    broken = "a\nb\n{% for m in messages %}"
    refused = own.template("broken", broken)
    assert (refused.status_code, refused.json()["code"]) == (422, "config_invalid")
    assert "line 3" in refused.json()["detail"]
    assert ".." not in own.template("broken", "{% for m in messages %}{% endfo %}").json()["detail"]
    taken = base.template("broken", broken)
    assert taken.status_code == 201
    (check,) = [c for c in taken.json()["report"]["checks"] if c["name"] == "chat template"]
    assert "does not compile: line 3" in check["detail"]
    assert "--adapter-templates own" not in check["detail"]  # such a server would refuse it
    assert taken.json()["serving"]["chat_digest"] is None


def test_a_template_that_renders_as_the_bases_is_none(own: Server) -> None:
    made = own.template("same", CHAT_TEMPLATE.replace("message['role']", "message.role") + "{# mine #}")
    assert made.json()["serving"]["chat_digest"] is None
    assert "renders conversations as the base's does" in made.text


def test_formats_that_the_template_does_not_keep_are_refused(own: Server) -> None:
    path = f"{own.server.admin_url}/admin/v1/tenants/acme/adapters/tools/versions"
    sent = own.files | {"chat_template.jinja": ("chat_template.jinja", b"{{ messages[0].content }}")}
    answer = own.server.http.post(
        path, files=sent, data={"serving": '{"tool_format": "hermes"}'}, headers=bearer(ADMIN_TOKEN)
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "unsupported_feature")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if messages[0].content == 'hi' %}" + BUSY + "{% endif %}x", "1.08 s of processing time"),
        ("{{ raise_exception('only wolves') if messages[0].content == 'hi' }}x", "only wolves"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) if messages[0].content == 'hi' }}x", "nesting"),
        ("{{ ''.__class__.__mro__ if messages[0].content == 'hi' }}x", "unsafe"),
        ("{% include 'x' if messages[0].content == 'hi' else 'y' %}", "no loader"),
    ],
)
def test_a_template_that_fails_is_the_tenants_400(own: Server, template: str, words: str) -> None:
    own.template("fails", template)
    versions = own.server.http.get(
        f"{own.server.admin_url}/admin/v1/tenants/acme/adapters/fails/versions", headers=bearer(ADMIN_TOKEN)
    ).json()["data"]
    name = f"fails@{versions[-1]['version']}"
    for answer in (own.chat(name), own.post("/tokenize", name), own.post("/v1/messages/count_tokens", name)):
        assert answer.status_code == 400, answer.text
        assert words in answer.text
    assert own.chat("plain", "rival").status_code == 200
    own.server.settle()


@pytest.mark.slow
def test_a_neighbours_chats_are_served_meanwhile(own: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    own.template("busy", "{% if messages[0].content == 'hi' %}" + BUSY + "{% endif %}y")
    own.push("alpaca", tenant="rival", **{"chat_template.jinja": ALPACA.encode()})
    run, answered = ForkProcess.run, threading.Event()

    async def slower(process: ForkProcess, body: bytes, *, owner: str = "", weight: int = 1) -> JobDone:
        done = await run(process, body, owner=owner, weight=weight)
        while owner.startswith("acme") and not answered.is_set():  # however fast the machine is
            await asyncio.sleep(0.01)
        return done

    monkeypatch.setattr(ForkProcess, "run", slower)
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(own.chat, "busy") for _ in range(4)]
        try:
            assert own.chat("plain", "rival").status_code == 200
            assert own.chat("alpaca", "rival").status_code == 200
            assert not any(future.done() for future in slow)
        finally:
            answered.set()
    assert {future.result().status_code for future in slow} == {400}


def test_a_deleted_version_renders_no_more(own: Server) -> None:
    own.template("gone", ALPACA + "gone")
    own.tokens("gone")
    own.server.http.delete(
        f"{own.server.admin_url}/admin/v1/tenants/acme/adapters/gone", headers=bearer(ADMIN_TOKEN)
    )
    assert own.post("/tokenize", "gone").status_code == 404
