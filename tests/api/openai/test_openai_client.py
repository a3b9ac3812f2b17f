"""The official OpenAI client against the data plane over a real socket."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from loraplex.api.generation.generation import Generation
from loraplex.engine.types import SamplingParams
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane

HI: Any = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("<user\nhi>\n<assistant\n")  # each of the template's marks is one token


def test_chat_answers_with_text_usage_and_headers(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Hello wörld", adapter_state="warm", cached_tokens=16))
    raw = plane.client().chat.completions.with_raw_response.create(
        model="pirate", messages=HI, extra_headers={"x-request-id": "mine-1"}
    )
    answer = raw.parse()
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "pirate"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello wörld")
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == HI_TOKENS
    assert usage.completion_tokens == len("Hello wörld".encode()) + 1  # and the end of the turn
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-loraplex-adapter"] == "pirate@v2"
    assert raw.headers["x-loraplex-adapter-state"] == "warm"
    assert "x-ratelimit-limit-requests" not in raw.headers


def test_base_has_no_adapter_headers(plane: DataPlane) -> None:
    raw = plane.client().chat.completions.with_raw_response.create(model=BASE, messages=HI)
    assert not [name for name in raw.headers if name.startswith("x-loraplex-adapter")]
    assert plane.engine.requests[0].adapter is None


def test_chat_streams(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Grüße"))
    chunks = list(plane.client().chat.completions.create(model="json", messages=HI, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert [c.choices[0].delta.content for c in middle] == ["G", "r", "ü", "ß", "e"]
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert all(chunk.usage is None for chunk in chunks)


def test_the_usage_chunk_comes_last_and_alone(plane: DataPlane) -> None:
    body = {"model": BASE, "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"Authorization": "Bearer lpx_acme"}
    answer = plane.http.post(f"{plane.url}/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    *chunks, usage = [httpx.Response(200, text=line).json() for line in lines[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == HI_TOKENS + len("ok") + 1


async def test_async_client_streams(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="abc"))
    async with plane.async_client() as client:
        stream = await client.chat.completions.create(model="pirate", messages=HI, stream=True)
        text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(text) == "abc"
        whole = await client.completions.create(model=BASE, prompt="x")
        assert whole.choices[0].text == "ok"


def test_stop_string_ends_the_answer_and_the_sequence(
    plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the engine, which knows nothing of stop strings, would go on."""
    monkeypatch.setattr(Generation.last_events, "__defaults__", (40.0,))
    plane.engine.script(Reply(text="one STOP two", hold=True, hold_after=10))
    before = time.monotonic()
    answer = plane.client().chat.completions.create(model=BASE, messages=HI, stop=["STOP"])
    assert time.monotonic() - before < 20
    assert answer.choices[0].message.content == "one "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one STOP")
    assert plane.engine.aborted == [plane.engine.requests[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_length_is_told(plane: DataPlane, stream: bool) -> None:
    plane.engine.script(Reply(text="abcdef"))
    answer: Any = plane.client().completions.create(model=BASE, prompt="x", max_tokens=3, stream=stream)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == "abc"
    assert choices[-1].finish_reason == "length"


def test_prompts_times_n_are_choices_in_order(plane: DataPlane) -> None:
    plane.engine.script(*(Reply(text=text) for text in ("a0", "a1", "b0", "b1")))
    answer = plane.client().completions.create(model=BASE, prompt=["aaa", "b"], n=2, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 4 * 3
    assert [(r.sampling.seed, r.sampling.choice) for r in plane.engine.requests] == [(7, 0), (7, 1)] * 2
    assert len({r.request_id for r in plane.engine.requests}) == 4
    assert plane.limiter.reserved["r0"]["n"] == 4


def test_choices_stream_side_by_side(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="first"), Reply(text="2nd"))
    texts = ["", ""]
    ends = []
    for chunk in plane.client().chat.completions.create(model=BASE, messages=HI, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends.append(chunk.choices[0].finish_reason)
    assert texts == ["first", "2nd"]
    assert ends.count("stop") == 2


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], "hi", ["hi"]])
def test_prompts_may_be_tokens_or_text(plane: DataPlane, prompt: Any) -> None:
    plane.client().completions.create(model=BASE, prompt=prompt)
    assert plane.engine.requests[0].prompt_ids == (104, 105)


def test_every_sampling_field_reaches_the_engine(plane: DataPlane) -> None:
    plane.client().chat.completions.create(
        model="pirate",
        messages=HI,
        max_completion_tokens=17,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=-1,
        logit_bias={"65": -100, "7": 1},
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "min_tokens": 2,
            "priority": 3,
        },
    )
    (request,) = plane.engine.requests
    assert request.sampling == SamplingParams(
        max_tokens=17,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=(1 << 63) - 1,
        logit_bias=((7, 1.0), (65, -100.0)),
        stop_token_ids=(9,),
        min_tokens=2,
        ignore_eos=True,
    )
    assert (request.tenant_id, request.priority) == ("acme", 3)
    assert plane.resolver.users == ["u"]
    assert request.adapter is not None
    assert request.adapter.name == "pirate"


def test_two_requests_without_a_seed_differ(plane: DataPlane) -> None:
    client = plane.client("lpx_rival")
    for _ in range(2):
        client.completions.create(model=BASE, prompt="x", extra_body={"top_k": -1, "temperature": 1e-9})
    first, second = plane.engine.requests
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.top_k == 0
    assert first.sampling.temperature == 0
    assert plane.engine.terms["rival"].weight == 3.0


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [(None, None, 256), (None, 10, 10), (5, None, 5), (MAX_MODEL_LEN - 1, None, MAX_MODEL_LEN - 1)],
)
def test_answer_length(plane: DataPlane, asked: int | None, limit: int | None, expected: int) -> None:
    plane.limiter.max_output_tokens = limit
    plane.client().completions.create(model=BASE, prompt="x", max_tokens=asked)
    assert plane.engine.requests[0].sampling.max_tokens == expected
    assert plane.limiter.reserved["r0"]["asked_tokens"] == asked


def test_default_length_is_what_is_left(plane: DataPlane) -> None:
    plane.client().completions.create(model=BASE, prompt=[1] * (MAX_MODEL_LEN - 9))
    assert plane.engine.requests[0].sampling.max_tokens == 9


def test_models(plane: DataPlane) -> None:
    cards = {card.id: card.model_dump() for card in plane.client().models.list()}
    assert list(cards) == [BASE, "pirate", "json"]
    assert cards[BASE]["parent"] is None
    assert cards["pirate"]["parent"] == BASE
    assert cards["pirate"]["max_model_len"] == MAX_MODEL_LEN
    assert cards["pirate"]["root"] == plane.resolver.adapters["acme", "pirate"][2].digest
    # Labels may be many: lists are without the head.
    assert plane.client().models.retrieve("pirate").model_dump() == cards["pirate"] | {"head": None}
    assert plane.client().models.retrieve(BASE).model_dump() == cards[BASE] | {"head": None}
    old = plane.client().models.retrieve("pirate@v1").model_dump()
    assert old["root"] == plane.resolver.adapters["acme", "pirate"][1].digest
