"""Activated LoRA on the data port: where the adapter begins to act, and prompts without its invocation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.invocation import find_invocation
from loraplex.api.metrics import EngineSnapshot
from loraplex.engine.reports import EngineStats
from support.engine.fake_engine import Reply, fake_engine_info
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane, ref

KEY = {"authorization": "Bearer lpx_acme"}
INVOCATION = tuple(b"[judge]")


@pytest.fixture
def judge(plane: DataPlane) -> DataPlane:
    """`judge` of acme is activated by "[judge]"; a token is a byte."""
    activated = replace(ref("acme", "judge", 1), invocation=INVOCATION)
    plane.resolver.adapters["acme", "judge"] = {1: activated}
    return plane


def post(plane: DataPlane, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return plane.http.post(f"{plane.url}{path}", json={"model": "judge", **body}, headers=KEY)


@given(st.lists(st.integers(0, 300), max_size=40), st.lists(st.integers(0, 300), min_size=1, max_size=3))
def test_the_last_occurrence_is_found(prompt: list[int], invocation: list[int]) -> None:
    size = len(invocation)
    for known in (prompt, prompt + invocation, invocation + prompt, prompt + invocation * 2 + prompt):
        starts = [at for at in range(len(known) - size + 1) if known[at : at + size] == invocation]
        assert find_invocation(known, invocation) == (starts[-1] if starts else None)


def test_halves_of_two_ids_are_no_invocation() -> None:
    assert find_invocation([0x01000000, 0x00000002], [0x02000100 >> 8]) is None
    assert find_invocation([0x00010000, 0x00020000], [0x00000001]) is None


def test_the_adapter_acts_from_the_last_occurrence_in_the_prompt(judge: DataPlane) -> None:
    judge.engine.default = Reply(text="[judge]")
    answer = post(judge, prompt=["[judge] a [judge] b", "c[judge]"], n=2)
    assert answer.status_code == 200
    assert [request.adapter_from for request in judge.engine.requests] == [10, 10, 1, 1]
    assert all(request.adapter is not None for request in judge.engine.requests)
    chat = post(judge, "/v1/chat/completions", messages=[{"role": "user", "content": "hi [judge]"}])
    assert chat.status_code == 200
    request = judge.engine.requests[-1]
    assert request.prompt_ids[request.adapter_from :][: len(INVOCATION)] == INVOCATION
    vectors = post(judge, "/v1/embeddings", input="sea [judge]")
    assert (vectors.status_code, judge.engine.requests[-1].adapter_from) == (200, 4)


def test_other_models_act_on_every_position(judge: DataPlane) -> None:
    for model in (BASE, "pirate"):
        post(judge, model=model, prompt="a [judge]")
        assert judge.engine.requests[-1].adapter_from == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a [judge]", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": "[judge"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
        ("/v1/embeddings", {"input": "sea"}, "input"),
    ],
)
def test_a_prompt_without_the_invocation_is_refused(
    judge: DataPlane, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(judge, path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "adapter_not_invoked",
        param,
        "invalid_request_error",
    )
    assert "judge@v1" in error["message"]
    assert "serving.alora" in error["message"]
    assert judge.engine.requests == []


def test_the_invocation_can_be_put_at_the_end(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "append"
    judge.engine.default = Reply(text="yes")
    answer = post(judge, prompt=["see", "a [judge] b"], echo=True, logprobs=0, max_tokens=3)
    bare, given_one = judge.engine.requests
    assert (bare.prompt_ids, bare.adapter_from) == ((*b"see", *INVOCATION), 3)
    assert (given_one.prompt_ids, given_one.adapter_from) == (tuple(b"a [judge] b"), 2)
    first, second = answer.json()["choices"]
    assert first["text"] == "see[judge]yes"
    assert second["text"] == "a [judge] byes"
    assert first["logprobs"]["text_offset"] == list(range(13))
    assert answer.json()["usage"]["prompt_tokens"] == 10 + 11


def test_an_appended_invocation_counts_for_the_context(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "append"
    room = MAX_MODEL_LEN - len(INVOCATION) - 1
    assert post(judge, prompt="a" * room, max_tokens=1).status_code == 200
    answer = post(judge, prompt="a" * (room + 1), max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_base_can_answer_instead(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "base"
    answer = post(judge, prompt=["see", "a [judge]"])
    assert answer.status_code == 200
    assert answer.headers["x-loraplex-adapter"] == "judge@v1"
    bare, invoked = judge.engine.requests
    assert (bare.adapter, bare.adapter_from, bare.prompt_ids) == (None, 0, tuple(b"see"))
    assert (invoked.adapter is not None, invoked.adapter_from) == (True, 2)
    assert [row.adapter for row in judge.ledger.accepted] == ["judge"]


def test_positions_shared_with_the_base_are_counted_by_adapter(judge: DataPlane) -> None:
    judge.engine.script(*[Reply(text="yes", cached_tokens=48)] * 2, Reply(text="no", cached_tokens=16))
    post(judge, prompt="a" * 40 + "[judge]" + "b" * 40, n=2)
    post(judge, prompt="a" * 40 + "[judge]")
    post(judge, model="pirate", prompt="a" * 40)
    judge.settle_all()
    text = judge.metrics.render(EngineSnapshot(fake_engine_info(), EngineStats(), [], True, 0)).decode()
    lines = [line for line in text.splitlines() if line.startswith("loraplex_alora_shared_tokens_total{")]
    assert lines == ['loraplex_alora_shared_tokens_total{adapter="judge@v1",tenant="acme"} 80.0']
