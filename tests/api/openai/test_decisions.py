"""The probabilities of a request's choices, of what a fake engine tells. Real numbers against transformers and PEFT are
in tests/e2e/openai/test_openai_logprobs.py."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

from loraplex.api.generation.decision import MAX_CHOICE_TOKENS, MAX_CHOICES
from support.engine.fake_engine import Reply, fake_row
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.waiting import eventually

KEY = {"authorization": "Bearer lpx_acme"}
CHAT: Any = (
    "chat/completions",
    {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "logprobs": True},
)
TEXT: Any = ("completions", {"model": BASE, "prompt": ["hi", "hello"], "logprobs": 0})
BOTH = pytest.mark.parametrize("kind", [CHAT, TEXT])
CHOICES = ["a", "bcd", "b", "bd", "é"]


def post(
    plane: DataPlane, kind: Any, choices: Any = CHOICES, timeout_s: float = 30, **fields: Any
) -> httpx.Response:
    route, body = kind
    body = {**body, "max_tokens": 1, "structured_outputs": {"choice": choices}, **fields}
    return plane.http.post(f"{plane.url}/v1/{route}", json=body, headers=KEY, timeout=timeout_s)


def expected(prompt: tuple[int, ...], choices: list[str] = CHOICES) -> list[dict[str, Any]]:
    """By the fake engine's numbers, of tokens that are bytes."""
    told = []
    for choice in choices:
        ids = tuple(choice.encode())
        if len(ids) == 1:
            logprob = -(ids[0] % 11 + len(prompt) + 1) / 8
        else:
            logprob = sum(fake_row(token, place, 0)[0] for place, token in enumerate(ids, len(prompt)))
        raw = math.exp(logprob)
        told.append({"choice": choice, "token_ids": list(ids), "logprob": logprob, "raw_probability": raw})
    total = sum(entry["raw_probability"] for entry in told)
    return [entry | {"probability": pytest.approx(entry["raw_probability"] / total)} for entry in told]


def check(told: Any, prompt: tuple[int, ...], choices: list[str] = CHOICES) -> None:
    assert told == [
        entry
        | {
            "logprob": pytest.approx(entry["logprob"]),
            "raw_probability": pytest.approx(entry["raw_probability"]),
        }
        for entry in expected(prompt, choices)
    ]
    assert sum(entry["probability"] for entry in told) == pytest.approx(1)


@BOTH
def test_whole_and_streamed_answers_tell_the_same(plane: DataPlane, kind: Any) -> None:
    plane.engine.default = Reply(text="b")
    whole = post(plane, kind, n=2).json()
    prompts = list(dict.fromkeys(r.prompt_ids for r in plane.engine.requests if r.grammar is not None))
    assert len(prompts) == (1 if kind is CHAT else 2)
    for choice in whole["choices"]:
        check(choice["choice_probabilities"], prompts[choice["index"] // 2])
    read = sum(map(len, prompts)) + len(prompts) * (3 + 2 + 2)  # "bcd", "bd" and the bytes of "é"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (read, 2 * len(prompts))
    answer = post(plane, kind, n=2, stream=True, stream_options={"include_usage": True})
    assert answer.status_code == 200, answer.text
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    told, usage = {}, None
    for event in events:
        chunk = json.loads(event.removeprefix("data: "))
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            assert ("choice_probabilities" in choice) == (choice["finish_reason"] is not None)
            if choice["finish_reason"]:
                told[choice["index"]] = choice["choice_probabilities"]
    assert [told[index] for index in range(2 * len(prompts))] == [
        choice["choice_probabilities"] for choice in whole["choices"]
    ]
    assert usage == whole["usage"]


def test_the_openai_client_reads_it(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="a")
    client = openai.OpenAI(base_url=f"{plane.url}/v1", api_key="lpx_acme", max_retries=0)
    asked: Any = {"max_tokens": 1, "extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}
    chat = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "hi"}], logprobs=True, **asked
    )
    text = client.completions.create(model=BASE, prompt="hi", logprobs=1, **asked)
    for choice in (chat.choices[0], text.choices[0]):
        told = (choice.model_extra or {})["choice_probabilities"]
        assert [entry["choice"] for entry in told] == ["a", "b"]


@BOTH
def test_choices_of_one_token_take_one_step_and_longer_ones_a_sequence_each(
    plane: DataPlane, kind: Any
) -> None:
    plane.engine.default = Reply(text="b")
    asked = {"top_logprobs": 3} if kind is CHAT else {"prompt": "hi", "logprobs": 3}
    (choice,) = post(plane, kind, ["b", "a"], **asked).json()["choices"]
    (only,) = plane.engine.requests
    assert (only.sampling.logprobs, only.sampling.logprob_token_ids) == (3, (98, 97))
    logprobs = choice["logprobs"]
    told = logprobs["content"][0] if kind is CHAT else logprobs
    assert len(told["top_logprobs"] if kind is CHAT else told["top_logprobs"][0]) == 3, (
        "the likely ones alone"
    )
    (again,) = post(plane, kind, **asked).json()["choices"]
    assert again["logprobs"] == logprobs
    *_, first, second, third, fourth = plane.engine.requests
    assert [request.prompt_ids[len(first.prompt_ids) :] for request in (second, third, fourth)] == [
        tuple(b"bcd"),
        tuple(b"bd"),
        tuple("é".encode()),
    ]
    for request in (second, third, fourth):
        assert request.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert request.sampling.scored_from == len(first.prompt_ids) - 1
        assert (request.sampling.max_tokens, request.grammar) == (0, None)
    # Named tokens are told as without choices.
    named = post(plane, kind, logprob_token_ids=[7, 98], **asked).json()["choices"][0]
    assert named["choice_probabilities"] == again["choice_probabilities"]
    plain = post(plane, kind, logprob_token_ids=[7, 98], **asked, structured_outputs=None).json()["choices"][
        0
    ]
    assert named["logprobs"] == plain["logprobs"]


@BOTH
def test_only_one_token_with_log_probabilities_decides(plane: DataPlane, kind: Any) -> None:
    plane.engine.default = Reply(text="a")
    for fields in ({"max_tokens": 2}, {"logprobs": None}, {"max_tokens": None}):
        answer = post(plane, kind, **fields)
        assert answer.status_code == 200
        assert "choice_probabilities" not in answer.text
    assert all(request.grammar for request in plane.engine.requests)
    many = [f"{number}" for number in range(MAX_CHOICES + 1)]
    assert post(plane, kind, many, max_tokens=4).status_code == 200


@BOTH
@pytest.mark.parametrize(
    ("choices", "param", "word"),
    [
        ([f"{number}" for number in range(MAX_CHOICES + 1)], "structured_outputs.choice", "at most 128"),
        (["a", "b", "a"], "structured_outputs.choice[2]", "same as 'structured_outputs.choice[0]'"),
        (["a", ""], "structured_outputs.choice[1]", "empty"),
        (["a", "<|end|>"], "structured_outputs.choice[1]", "no tokens of this model spell '<|end|>'"),
        (["a" * MAX_CHOICE_TOKENS, "b"], "structured_outputs.choice", f"at most {MAX_CHOICE_TOKENS}"),
        (["a" * 40_000, "b" * 40_000], "structured_outputs.choice", "characters together"),
        ([], "structured_outputs.choice", "at least"),
    ],
)
def test_bad_choices_are_refused_in_words_before_any_work(
    plane: DataPlane, kind: Any, choices: list[str], param: str, word: str
) -> None:
    answer = post(plane, kind, choices)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert word in error["message"]
    assert plane.engine.requests == []


def test_what_has_no_room_is_refused(plane: DataPlane) -> None:
    """A choice behind the prompt; tokens that are named beside those of the choices; sequences of a tenant's limit."""
    answer = post(plane, TEXT, ["a", "b" * 20], prompt="x" * (MAX_MODEL_LEN - 10))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    named = post(plane, TEXT, logprob_token_ids=list(range(128)))
    assert (named.status_code, named.json()["error"]["param"]) == (400, "logprob_token_ids")
    many = post(plane, TEXT, [f"{a}{b}" for a in range(10) for b in range(10)], prompt=["x"] * 16)
    assert (many.status_code, many.json()["error"]["param"]) == (400, "structured_outputs.choice")
    assert plane.engine.requests == []


def test_it_is_charged_for_all_that_is_read(plane: DataPlane) -> None:
    """Before the work, and after it: the prompts, and the choices of several tokens behind each."""
    plane.engine.default = Reply(text="b")
    usage = post(plane, TEXT).json()["usage"]
    ((_, reserved),) = plane.limiter.reserved.items()
    read = len("hi") + len("hello") + 2 * len("bcd" + "bd" + "..")
    assert (reserved["prompt_tokens"], reserved["n"], usage["prompt_tokens"]) == (read, 6, read)
    eventually(lambda: len(plane.limiter.settled) == 1)
    assert plane.limiter.settled[0][1] == usage["total_tokens"] == read + 2
    assert plane.ledger.rows[-1].prompt_tokens == read


def test_a_client_that_goes_away_leaves_no_sequence(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="b"), *[Reply(text="", hold=True)] * 3)
    with pytest.raises(httpx.ReadTimeout):
        post(plane, CHAT, timeout_s=0.5)
    eventually(lambda: len(plane.engine.aborted) == 3)


def test_a_sequence_that_fails_fails_the_request(plane: DataPlane) -> None:
    for stream in (False, True):
        plane.engine.script(Reply(text="b"), Reply(error=("engine_restarting", "gone"), retry_after_s=1.0))
        answer = post(plane, CHAT, stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_restarting")
