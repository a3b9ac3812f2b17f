"""Versions that are activated LoRAs, over both ports: odd invocations in uploads, and releases that change between
plain and activated versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine.fake_engine import FakeEngineClient
from support.http.admin_plane import ADMIN_TOKEN, ARCH, adapter_files
from support.http.whole_server import WholeServer, bearer, whole_server

INVOCATION = b"!?"
"""A token is a byte; the base that versions are checked against has 64 tokens."""


class Server:
    """A whole server, with the adapters of acme."""

    def __init__(self, server: WholeServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.pushed = 0
        server.plane.make_tenant("acme")
        self.key = server.plane.make_key("acme", "inference", "adapters:write")

    @property
    def engine(self) -> FakeEngineClient:
        return self.server.plane.engine

    def push(self, name: str, invocation: str = "null", **serving: Any) -> httpx.Response:
        """`invocation`: alora_invocation_tokens as the text of its JSON."""
        self.pushed += 1
        folder = self.folder / str(self.pushed)
        folder.mkdir()
        files = adapter_files(folder, seed=self.pushed)
        config = json.loads(files["adapter_config.json"][1])
        del config["alora_invocation_tokens"]
        text = f'{json.dumps(config)[:-1]}, "alora_invocation_tokens": {invocation}}}'
        files["adapter_config.json"] = "adapter_config.json", text.encode()
        path = f"{self.server.admin_url}/admin/v1/tenants/acme/adapters/{name}/versions"
        return self.server.http.post(
            path, files=files, data={"serving": json.dumps(serving)}, headers=bearer(ADMIN_TOKEN)
        )

    def release(self, name: str, **weights: int) -> None:
        targets = [{"version": version, "weight": weight} for version, weight in weights.items()]
        path = f"{self.server.admin_url}/admin/v1/tenants/acme/adapters/{name}/release"
        answer = self.server.http.put(path, json={"targets": targets}, headers=bearer(ADMIN_TOKEN))
        assert answer.status_code == 200, answer.text

    def ask(self, model: str, prompt: str) -> httpx.Response:
        return self.server.http.post(
            f"{self.server.data_url}/v1/completions",
            json={"model": model, "prompt": prompt, "max_tokens": 1},
            headers=bearer(self.key),
        )

    def acts_from(self, model: str, prompt: str) -> tuple[int, int]:
        """The version that answers, and where it begins to act."""
        answer = self.ask(model, prompt)
        assert answer.status_code == 200, answer.text
        request = self.engine.requests[-1]
        assert request.adapter is not None
        return request.adapter.version, request.adapter_from


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with whole_server(tmp_path_factory.mktemp("server")) as running:
        yield Server(running, tmp_path_factory.mktemp("adapters"))
        running.settle()


@pytest.mark.parametrize(
    ("invocation", "code"),
    [
        ("[]", "config_invalid"),
        ("{}", "config_invalid"),
        ("false", "config_invalid"),
        ("0", "config_invalid"),
        ('"!?"', "config_invalid"),
        ("[-1]", "config_invalid"),
        ("[true]", "config_invalid"),
        ("[33.0]", "config_invalid"),
        ("[null]", "config_invalid"),
        ('["33"]', "config_invalid"),
        ("[[33]]", "config_invalid"),
        ("[33, {}]", "config_invalid"),
        (json.dumps([33] * 65), "config_invalid"),
        ("[64]", "base_mismatch"),
        (f"[33, {2**40}]", "base_mismatch"),
    ],
)
def test_an_odd_invocation_is_refused_by_name(server: Server, invocation: str, code: str) -> None:
    answer = server.push("odd", invocation)
    assert (answer.status_code, answer.json()["code"]) == (422, code), answer.text
    assert "alora_invocation_tokens" in answer.json()["detail"]
    assert server.ask("odd", "x").status_code == 404


@pytest.mark.parametrize(
    "invocation",
    [
        "[NaN]",
        "[1e999]",
        f"[{2**64}]",
        f"[-{'9' * 4000}]",
        f"[{'9' * 5000}]",
        f"{'[' * 5000}{']' * 5000}",
        "[33",
        "",
    ],
)
def test_what_is_no_json_is_refused(server: Server, invocation: str) -> None:
    answer = server.push("odd", invocation)
    assert (answer.status_code, answer.json()["code"]) == (422, "config_invalid"), answer.text
    assert len(answer.json()["detail"]) < 200


@pytest.mark.parametrize("invocation", [[0], [ARCH.vocab - 1] * 64, [33, 33]])
def test_the_largest_and_smallest_are_taken(server: Server, invocation: list[int]) -> None:
    made = server.push("edge", json.dumps(invocation))
    assert (made.status_code, made.json()["invocation"]) == (201, invocation)
    prompt = bytes([1, *invocation, *invocation[1:], 2]).decode()
    version = int(made.json()["version"].removeprefix("v"))
    assert server.acts_from(f"edge@v{version}", prompt) == (version, len(prompt) - 1 - len(invocation))


def test_releases_change_between_plain_and_activated_versions(server: Server) -> None:
    """What acts where is the version's that answers, also where it is asked for by its number."""
    ids = json.dumps(list(INVOCATION))
    for serving in ({}, {"alora": "append"}):
        assert server.push("check").status_code == 201
        assert server.push("check", ids, **serving).status_code == 201
    plain, refuses, appends = (f"v{number}" for number in (1, 2, 4))
    server.release("check", **{plain: 100})
    assert server.acts_from("check", "see !?") == (1, 0)
    assert server.acts_from("check", "see") == (1, 0)
    server.release("check", **{refuses: 100})
    assert server.acts_from("check", "see !?") == (2, 4)
    assert server.ask("check", "see").json()["error"]["code"] == "adapter_not_invoked"
    assert server.acts_from("check@v1", "see") == (1, 0)
    server.release("check", **{appends: 100})
    assert server.acts_from("check", "see") == (4, 3)
    server.release("check", **{plain: 1, appends: 1})
    seen = {server.acts_from("check", "see") for _ in range(64)}
    assert seen == {(1, 0), (4, 3)}
    server.release("check", **{plain: 100})
    assert server.acts_from("check", "see !?") == (1, 0)
