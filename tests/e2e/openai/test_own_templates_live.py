"""A version's own chat template and ends of answers on a whole server, with a real engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from support.adapters.drafts import draft_adapter
from support.models.byte_tokenizer import byte_decode
from support.servers.live_server import (
    ADAPTER_FILES,
    TINY,
    LiveServer,
    post_version,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

TEMPLATE = "Q: {{ messages[-1].content }}\nA:"
RANKS = (
    "{% for message in messages %}{{ {'query': 'Q:', 'document': ' D:'}.get(message.role) }}{{ message.content }}"
    "{% endfor %}?"
)
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
    draft = draft_adapter(TINY, task_type="SEQ_CLS", modules_to_save=["score"])
    draft.tensors["base_model.model.score.weight"] = np.linspace(-1, 1, TINY.hidden, dtype=np.float32)[None]
    written = draft.write(tmp_path_factory.mktemp("ranks"))
    sent = {path.name: (path.name, path.read_bytes()) for path in (written.config, written.tensors)}
    sent["chat_template.jinja"] = ("chat_template.jinja", RANKS.encode())
    assert post_version(spoken.admin, "tenants/own/adapters/ranks/versions", sent).status_code == 201
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


def test_a_reranker_s_pairs_are_written_by_its_own_template(http: httpx.Client) -> None:
    """The score of a pair is that of the text which the template makes of it."""
    texts = {"text_1": "owl", "text_2": ["the night", "a ship"]}
    scored = http.post("/score", json={"model": "ranks", **texts}).json()["data"]
    written = ["Q:owl D:the night?", "Q:owl D:a ship?"]
    classes = http.post("/classify", json={"model": "ranks", "input": written}).json()["data"]
    logits = [item["probs"][0] for item in classes]
    assert len(set(logits)) == 2
    for item, logit in zip(scored, logits, strict=True):
        assert item["score"] == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)


def test_an_answer_ends_where_its_version_ends_it(http: httpx.Client) -> None:
    """The tiny model writes any byte: a quarter of them are ends here."""
    ended = chat(http, "ends")
    assert ended["choices"][0]["finish_reason"] == "stop"
    ignoring = chat(http, "ends", ignore_eos=True)
    assert ignoring["usage"]["completion_tokens"] == 200
    assert ended["usage"]["completion_tokens"] < 200
