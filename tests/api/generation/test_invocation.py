"""Activated LoRA on the data port: where the adapter begins to act, and prompts without its invocation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.invocation import find_invocation
from loraplex.api.metrics import EngineSnapshot
from loraplex.control.types import WithoutInvocation
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


TOKENS = st.sampled_from([0, 1, 2, 256, 0xD800, 0xDFFF, 0xFFFF, 0x10000, 0x20000])
"""Some are no characters; bytes of others are those of two of their neighbours."""
BEYOND = st.sampled_from([0x10FFFF, 0x110000, 2**31 - 1])
"""Above any vocabulary, as a client may give them."""


@given(st.lists(TOKENS | BEYOND, max_size=40), st.lists(TOKENS, min_size=1, max_size=3))
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


@pytest.mark.parametrize("setting", [None, "append", "base"])
@pytest.mark.parametrize("prompt", ["see", "a [judge] b", "[judge", "a[judge]"])
def test_what_is_counted_before_is_what_the_request_has(
    judge: DataPlane, setting: WithoutInvocation | None, prompt: str
) -> None:
    if setting is not None:
        judge.resolver.alora["judge"] = setting
    said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    ways = [
        ("/tokenize", {"prompt": prompt}, "/v1/completions", {"prompt": prompt, "max_tokens": 1}),
        ("/tokenize", said, "/v1/chat/completions", said | {"max_tokens": 1}),
        ("/v1/messages/count_tokens", said, "/v1/messages", said | {"max_tokens": 1}),
    ]
    for count_path, counted, path, asked in ways:
        told = post(judge, count_path, **counted)
        assert told.status_code == 200, told.text
        answer = post(judge, path, **asked)
        if setting is None and "[judge]" not in prompt:
            assert answer.status_code == 400  # counted as it is
            continue
        request = judge.engine.requests[-1]
        if "tokens" in told.json():
            assert tuple(told.json()["tokens"]) == request.prompt_ids
            assert told.json()["count"] == answer.json()["usage"]["prompt_tokens"]
        else:
            assert told.json() == {"input_tokens": answer.json()["usage"]["input_tokens"]}
    # What was counted is asked again by its ids, and nothing is appended twice.
    ids = post(judge, "/tokenize", prompt=prompt).json()["tokens"]
    if post(judge, prompt=ids, max_tokens=1).status_code == 200:
        assert judge.engine.requests[-1].prompt_ids == tuple(ids)


def test_a_conversation_without_an_answers_beginning_is_counted_as_it_is(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "append"
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    told = post(judge, "/tokenize", **said).json()["tokens"]
    assert told == post(judge, "/tokenize", **said | {"model": BASE}).json()["tokens"]


def test_the_names_of_an_appended_invocations_tokens_are_told(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "append"
    told = post(judge, "/tokenize", prompt="é", return_token_strs=True).json()
    assert (len(told["token_strs"]), told["token_strs"][-1]) == (2 + len(INVOCATION), "]")


def test_a_prompt_that_is_too_long_is_refused_with_an_echo_too(judge: DataPlane) -> None:
    judge.resolver.alora["judge"] = "append"
    answer = post(judge, prompt=["a", "b" * (MAX_MODEL_LEN + 1)], echo=True, max_tokens=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(("invocation", "reasoning"), [("<think>", "Hm."), ("[judge]", None)])
def test_reasoning_is_open_where_the_appended_invocation_opens_it(
    judge: DataPlane, invocation: str, reasoning: str | None
) -> None:
    ids = judge.services.text.encode(invocation)
    activated = replace(ref("acme", "judge", 1), invocation=tuple(ids))
    judge.resolver.adapters["acme", "judge"] = {1: activated}
    judge.resolver.alora["judge"] = "append"
    judge.resolver.formats["judge"] = ("none", "think_tags")
    judge.engine.default = Reply(text="Hm.</think>yes" if reasoning else "yes")
    answer = post(judge, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    message = answer.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, "yes")


PROMPTS = st.lists(st.text("[judge] a", min_size=1, max_size=12), min_size=1, max_size=4)


@given(
    prompts=st.one_of(PROMPTS, PROMPTS.map(lambda texts: [list(text.encode()) for text in texts])),
    setting=st.sampled_from([None, "append", "base"]),
    invocation=st.sampled_from([b"[judge]", b"a", b"  ", b"[judge]" * 9]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 3),
            "echo": st.booleans(),
            "logprobs": st.integers(0, 2),
            "prompt_logprobs": st.integers(0, 2),
            "stop": st.sampled_from(["[judge]", ["a", "b"]]),
            "max_tokens": st.integers(1, 3),
        },
    ),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_prompt_has_the_place_that_its_tokens_give_it(
    judge: DataPlane,
    prompts: list[Any],
    setting: WithoutInvocation | None,
    invocation: bytes,
    options: dict[str, Any],
) -> None:
    judge.resolver.adapters["acme", "judge"] = {
        1: replace(ref("acme", "judge", 1), invocation=tuple(invocation))
    }
    judge.resolver.alora = {} if setting is None else {"judge": setting}
    judge.engine.requests.clear()
    answer = post(judge, prompt=prompts, **options)
    texts = [prompt.encode() if isinstance(prompt, str) else bytes(prompt) for prompt in prompts]
    if setting is None and any(invocation not in text for text in texts):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_not_invoked")
        assert judge.engine.requests == []
        return
    assert answer.status_code == 200, answer.text
    asked = judge.engine.requests
    assert len(asked) == len(texts) * options.get("n", 1)
    for number, request in enumerate(asked):
        text = texts[number // options.get("n", 1)]
        if invocation not in text and setting == "append":
            text += invocation
        assert bytes(request.prompt_ids) == text
        assert (request.adapter is None, request.adapter_from) == (
            (False, text.rindex(invocation)) if invocation in text else (True, 0)
        )


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
