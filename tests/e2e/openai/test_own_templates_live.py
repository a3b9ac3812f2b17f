"""A version's own chat template and ends of answers on a whole server, with a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.models.byte_tokenizer import byte_decode
from support.servers.live_server import (
    ADAPTER_FILES,
    LiveServer,
    post_version,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

TEMPLATE = "Q: {{ messages[-1].content }}\nA:"
EVERY_LETTER = list(range(256))


@pytest.fixture(scope="module")
def server(spoken: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    spoken.create_tenant("own")
    folder = write_tiny_adapter(tmp_path_factory.mktemp("own") / "adapter", seed=1)
    files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
    brought = {
        "plain": {},
        "asks": {"chat_template.jinja": TEMPLATE.encode()},
        "ends": {"generation_config.json": json.dumps({"eos_token_id": EVERY_LETTER[:64]}).encode()},
    }
    for name, more in brought.items():
        sent = files | {part: (part, data) for part, data in more.items()}
        assert post_version(spoken.admin, f"tenants/own/adapters/{name}/versions", sent).status_code == 201
    return spoken


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client(server.create_key("own")) as client:
        yield client


def chat(http: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    # These kernels round by the number of rows, so no draft may change it.
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 200}
    body["speculation"] = False
    answer = http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_equal_weights_answer_by_their_own_templates(http: httpx.Client) -> None:
    own = http.post("/tokenize", json={"model": "asks", "messages": [{"role": "user", "content": "hi"}]})
    assert byte_decode(own.json()["tokens"]) == "Q: hi\nA:"
    asks, plain = chat(http, "asks"), chat(http, "plain")
    assert asks["usage"]["prompt_tokens"] == own.json()["count"]
    assert plain["usage"]["prompt_tokens"] != own.json()["count"]
    completed = http.post(
        "/v1/completions",
        json={"model": "asks", "prompt": "Q: hi\nA:", "seed": 1, "max_tokens": 200, "speculation": False},
    ).json()
    assert completed["usage"]["completion_tokens"] == asks["usage"]["completion_tokens"]


def test_an_answer_ends_where_its_version_ends_it(http: httpx.Client) -> None:
    """The tiny model writes any byte: a quarter of them are ends here."""
    ended = chat(http, "ends")
    assert ended["choices"][0]["finish_reason"] == "stop"
    ignoring = chat(http, "ends", ignore_eos=True)
    assert ignoring["usage"]["completion_tokens"] == 200
    assert ended["usage"]["completion_tokens"] < 200
