"""`/v1/embeddings`: OpenAI's wire, and the way that every request goes."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from loraplex.api.embeddings.answers import EmbeddingsAnswer, normalised
from loraplex.api.embeddings.schemas import MAX_ANSWER_BYTES, MAX_INPUTS, EmbeddingsRequest, most_inputs
from loraplex.engine.pooling import Pooling
from loraplex.engine.types import EngineRequest, SamplingParams
from support.engine.fake_engine import HIDDEN_SIZE, Reply, fake_engine_info, fake_pooled
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.waiting import eventually

KEY = {"authorization": "Bearer lpx_acme"}


def post(plane: DataPlane, body: Any, **headers: str) -> httpx.Response:
    return plane.http.post(f"{plane.url}/v1/embeddings", json=body, headers=KEY | headers)


def numbers_of(text: str, *, model: int = 0, pooling: Pooling = "mean") -> list[float]:
    """The engine's own of a text: a token is a byte."""
    request = EngineRequest("x", "acme", tuple(text.encode()), SamplingParams(0), pooling=pooling)
    packed = fake_pooled(request)
    assert packed is not None
    numbers = list(struct.unpack(f"<{HIDDEN_SIZE}f", packed))
    numbers[4] = model
    return numbers


def unit(numbers: list[float]) -> list[float]:
    return [float(n) for n in (np.array(numbers) / np.linalg.norm(numbers)).astype(np.float32)]


def test_openai_s_client_gets_unit_vectors(plane: DataPlane) -> None:
    """It asks for base64 by itself, and decodes it."""
    for asked in ({}, {"encoding_format": "float"}, {"dimensions": HIDDEN_SIZE}):
        answer = plane.client().embeddings.create(model=BASE, input=["sea", "a ship"], user="u-1", **asked)
        assert answer.object == "list"
        assert answer.model == BASE
        assert [(item.object, item.index) for item in answer.data] == [("embedding", 0), ("embedding", 1)]
        assert [item.embedding for item in answer.data] == [
            unit(numbers_of(text)) for text in ("sea", "a ship")
        ]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)
    assert plane.resolver.users[-1] == "u-1"


def test_the_answer_is_what_openai_s_reference_says(plane: DataPlane) -> None:
    answer = post(plane, {"model": "pirate@v1", "input": "sea", "normalize": False, "pooling": "last"})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": numbers_of("sea", model=1, pooling="last")}
        ],
        "model": "pirate@v1",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert answer.headers["x-loraplex-adapter"] == "pirate@v1"
    assert answer.headers["x-loraplex-adapter-state"] == "hot"
    (request,) = plane.engine.requests
    assert (request.pooling, request.sampling.max_tokens, request.adapter) == (
        "last",
        0,
        plane.resolver.adapters["acme", "pirate"][1],
    )


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("sea", [b"sea"]),
        (["sea", "ship"], [b"sea", b"ship"]),
        ([5, 6, 7], [bytes([5, 6, 7])]),
        ([[5, 6], [7]], [bytes([5, 6]), bytes([7])]),
        (["x"] * 1000, [b"x"] * 1000),
    ],
)
def test_every_kind_of_input_in_its_order(plane: DataPlane, given: Any, prompts: list[bytes]) -> None:
    answer = post(plane, {"model": BASE, "input": given, "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    assert [bytes(request.prompt_ids) for request in plane.engine.requests] == prompts
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(prompts)))
    first = np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4")
    assert abs(float(np.linalg.norm(first)) - 1) < 1e-6
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": "x"}, (400, "invalid_value", "model")),
        ({"model": BASE}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": []}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": ""}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": ["x", ""]}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": ["x", [5]]}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": [1 << 20]}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": [-1]}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": "x" * (MAX_MODEL_LEN + 1)}, (400, "context_length_exceeded", "input")),
        ({"model": BASE, "input": ["x"] * (MAX_INPUTS + 1)}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": ["x"] * 1025}, (400, "invalid_value", "input")),
        ({"model": BASE, "input": "x", "dimensions": 3}, (400, "unsupported_field", "dimensions")),
        ({"model": BASE, "input": "x", "dimensions": 0}, (400, "invalid_value", "dimensions")),
        ({"model": BASE, "input": "x", "encoding_format": "bytes"}, (400, "invalid_value", "encoding_format")),
        ({"model": BASE, "input": "x", "pooling": "max"}, (400, "invalid_value", "pooling")),
        ({"model": BASE, "input": "x", "truncation_side": "left"}, (400, "unsupported_field", "truncation_side")),
        ({"model": BASE, "input": "x", "embed_dtype": "float16"}, (400, "unsupported_field", "embed_dtype")),
        ({"model": BASE, "messages": [{"role": "user", "content": "x"}]}, (400, "unsupported_field", "messages")),
        ({"model": BASE, "input": "x", "stream": True}, (400, "unsupported_field", "stream")),
        ({"model": "nobody", "input": "x"}, (404, "model_not_found", "model")),
    ],
)  # fmt: skip
def test_refusals_name_the_field(plane: DataPlane, body: Any, told: tuple[int, str, str]) -> None:
    answer = post(plane, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == told
    assert "'prompt'" not in error["message"]


def test_neutral_values_ask_for_nothing(plane: DataPlane) -> None:
    body = {
        "model": BASE,
        "input": "x",
        "dimensions": None,
        "truncate_prompt_tokens": None,
        "embed_dtype": "float32",
    }
    assert post(plane, body).status_code == 200


def test_an_answer_has_a_bounded_number_of_bytes(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane.engine, "_info", fake_engine_info(hidden_size=1 << 20))
    answer = post(plane, {"model": BASE, "input": ["x"] * 2})
    assert answer.status_code == 400
    told = "may have 1, or 4 with encoding_format base64: an answer has 24 MiB at most."
    assert told in answer.json()["error"]["message"]
    assert post(plane, {"model": BASE, "input": ["x"] * 5, "encoding_format": "base64"}).status_code == 400
    assert plane.engine.live == [], "it was refused before any work"


@pytest.mark.parametrize("how", ["float", "base64"])
def test_the_longest_numbers_fit(how: str) -> None:
    size = 1 << 16
    most = most_inputs(how, size)
    asked = EmbeddingsRequest(model="m", input=["x"], encoding_format=how, normalize=False)
    written = EmbeddingsAnswer(asked)._written(struct.pack("<f", -(2.0**-126)) * size)
    assert most * len(written) <= MAX_ANSWER_BYTES + 6 * most  # brackets, quotes, padding
    assert (most + 1) * len(written) > MAX_ANSWER_BYTES


def test_a_model_without_hidden_states_is_refused(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane.engine, "_info", fake_engine_info(hidden_size=None))
    error = post(plane, {"model": BASE, "input": "x"}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_field", "model")


def test_it_is_charged_for_its_prompts_alone(plane: DataPlane) -> None:
    assert post(plane, {"model": "pirate", "input": ["sea", "ship"]}).status_code == 200
    ((_, reserved),) = plane.limiter.reserved.items()
    expected = {"tenant": "acme", "prompt_tokens": 7, "asked_tokens": 0, "default_tokens": 0, "n": 2}
    assert reserved == expected
    eventually(lambda: len(plane.limiter.settled) == 1)
    assert plane.limiter.settled[0][1] == 7


def test_a_failure_ends_all_of_it(plane: DataPlane) -> None:
    plane.engine.script(Reply(), Reply(error=("adapter_unavailable", "no room")), Reply(hold=True))
    answer = post(plane, {"model": "pirate", "input": ["a", "b", "c"]})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "adapter_unavailable"
    eventually(lambda: not plane.engine.live)
    assert len(plane.engine.aborted) == 1


def test_a_deadline_ends_it(plane: DataPlane) -> None:
    plane.engine.script(Reply(hold=True))
    answer = post(plane, {"model": BASE, "input": ["a", "b"]}, **{"x-loraplex-timeout-ms": "50"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    eventually(lambda: not plane.engine.live)


async def test_a_client_that_hangs_up_leaves_nothing(plane: DataPlane) -> None:
    plane.engine.script(Reply(hold=True))
    body = {"model": BASE, "input": "a"}
    async with httpx.AsyncClient(headers=KEY, timeout=60) as http:
        asking = asyncio.create_task(http.post(f"{plane.url}/v1/embeddings", json=body))
        await asyncio.to_thread(eventually, lambda: bool(plane.engine.live))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    eventually(lambda: not plane.engine.live)
    assert plane.engine.aborted


def test_others_are_answered_while_many_vectors_are_written(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are there at once, and each takes a while to write."""
    turns, of_answer = [0], list[int]()
    add = EmbeddingsAnswer.add

    def slow(self: EmbeddingsAnswer, *of: Any) -> None:
        of_answer.append(turns[0])
        time.sleep(0.01)
        add(self, *of)

    async def count() -> None:
        while len(of_answer) < 40:
            turns[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(EmbeddingsAnswer, "add", slow)
    plane.engine.script(Reply(hold=True))
    plane.on_loop(lambda: asyncio.ensure_future(count()))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(post, plane, {"model": BASE, "input": ["x"] * 40})
        eventually(lambda: plane.on_loop(lambda: len(plane.engine.live) == 1))
        plane.on_loop(plane.engine.release)
        assert answer.result().status_code == 200
    assert len(set(of_answer)) == 40


def test_zeros_stay_zeros() -> None:
    assert normalised(bytes(8)) == bytes(8)
