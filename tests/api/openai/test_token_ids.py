"""What vLLM's clients ask for beside the text: log probabilities of prompts and of named tokens, and token ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from loraplex.api.generation.planning import MAX_LOGPROBS, TOKEN_IDS_A_LOGPROB
from support.engine.fake_engine import VOCAB_SIZE, Reply, fake_named, fake_rank, fake_row
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.models.byte_tokenizer import EOS_ID

KEY = {"authorization": "Bearer lpx_acme"}
CHAT: Any = ("chat/completions", {"model": BASE, "messages": [{"role": "user", "content": "hi"}]})
TEXT: Any = ("completions", {"model": BASE, "prompt": ["hi", "hello"]})
BOTH = pytest.mark.parametrize("kind", [CHAT, TEXT])


def post(plane: DataPlane, kind: Any, **fields: Any) -> httpx.Response:
    route, body = kind
    return plane.http.post(f"{plane.url}/v1/{route}", json={**body, **fields}, headers=KEY)


def refused(plane: DataPlane, kind: Any, **fields: Any) -> tuple[str, str]:
    answer = post(plane, kind, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["param"], error["code"]


def chunks(plane: DataPlane, kind: Any, **fields: Any) -> list[Any]:
    answer = post(plane, kind, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def name_of(token_id: int) -> str:
    return {256: "<|end|>", 257: "<|start|>", 258: "<|pad|>", 259: "<think>"}.get(token_id) or (
        chr(token_id) if token_id < 128 else f"\\x{token_id:02x}"
    )


def expected_prompt(ids: tuple[int, ...], num_top: int) -> list[Any]:
    """What must be told of a prompt that the fake engine scored."""
    told: list[Any] = [None]
    for place, token_id in enumerate(ids[1:], 1):
        own, top = fake_row(token_id, place, num_top)
        rank = next(
            (n for n, (other, _) in enumerate(top, 1) if other == token_id), fake_rank(token_id, place)
        )
        ranked = {token_id: (own, rank)}
        for number, (other, value) in enumerate(top, 1):
            ranked.setdefault(other, (value, number))
        told.append(
            {
                str(other): {"logprob": value, "rank": number, "decoded_token": name_of(other)}
                for other, (value, number) in ranked.items()
            }
        )
    return told


# Of prompts.


@pytest.mark.parametrize("num_top", [0, 1, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_log_probabilities_of_the_prompt(plane: DataPlane, num_top: int, n: int) -> None:
    plane.engine.script(*[Reply(text="ab")] * 3 * n)
    whole = post(plane, CHAT, prompt_logprobs=num_top, n=n).json()
    ids = plane.engine.requests[-1].prompt_ids
    assert whole["prompt_logprobs"] == expected_prompt(ids, num_top)
    assert next(iter(whole["prompt_logprobs"][1])) == str(ids[1]), "its own entry is the first"
    assert all("prompt_logprobs" not in choice for choice in whole["choices"])
    whole = post(plane, TEXT, prompt_logprobs=num_top, n=n).json()
    assert "prompt_logprobs" not in whole
    prompts = [prompt for prompt in (tuple(b"hi"), tuple(b"hello")) for _ in range(n)]
    told = [choice["prompt_logprobs"] for choice in whole["choices"]]
    assert told == [expected_prompt(prompt, num_top) for prompt in prompts]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 2 * n
    scored = [request.sampling.prompt_logprobs for request in plane.engine.requests]
    assert scored == [num_top, *[None] * (n - 1)] * 3, "a prompt is scored once"


def test_prompt_of_one_token_and_requests_that_do_not_ask(plane: DataPlane) -> None:
    (choice,) = post(plane, TEXT, prompt="x", prompt_logprobs=2).json()["choices"]
    assert choice["prompt_logprobs"] == [None]
    for kind in (CHAT, TEXT):
        whole = post(plane, kind, prompt_logprobs=None, return_token_ids=None, logprob_token_ids=None)
        for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
            assert name not in whole.text
        sampling = plane.engine.requests[-1].sampling
        assert (sampling.prompt_logprobs, sampling.prompt_ranks, sampling.logprob_token_ids) == (
            None,
            False,
            (),
        )


@pytest.mark.parametrize("num_top", [0, 1, 4])
@pytest.mark.parametrize("echoed", [0, 3])
def test_beside_an_echo_each_has_as_many_as_it_asked_for(plane: DataPlane, num_top: int, echoed: int) -> None:
    body: Any = {"prompt": "hello", "echo": True, "logprobs": echoed, "max_tokens": 0}
    (alone,) = post(plane, TEXT, **body).json()["choices"]
    (both,) = post(plane, TEXT, **body, prompt_logprobs=num_top).json()["choices"]
    assert both["logprobs"] == alone["logprobs"]
    assert both["prompt_logprobs"] == expected_prompt(tuple(b"hello"), num_top)
    assert plane.engine.requests[-1].sampling.prompt_logprobs == max(num_top, echoed)


@BOTH
def test_refused_prompt_logprobs(plane: DataPlane, kind: Any) -> None:
    for value in (-1, 21, 1.5, True, "1", [1], 1 << 70):
        assert refused(plane, kind, prompt_logprobs=value) == ("prompt_logprobs", "invalid_value")
    for value in (0, 1):
        assert refused(plane, kind, prompt_logprobs=value, stream=True) == (
            "prompt_logprobs",
            "invalid_value",
        )
    assert plane.engine.requests == []
    assert post(plane, kind, prompt_logprobs=None, stream=True).status_code == 200


# Of tokens that the request names.

NAMED = [65, 7, 256, 65, 97]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_named_tokens(plane: DataPlane, stream: bool) -> None:
    """The token itself, then those that are named, in their order, each once."""
    plane.engine.script(Reply(text="ab", chunk=2))
    fields = {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": NAMED}
    if stream:
        entries = [
            entry
            for chunk in chunks(plane, CHAT, **fields)
            for choice in chunk["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
    else:
        entries = post(plane, CHAT, **fields).json()["choices"][0]["logprobs"]["content"]
    start = len(plane.engine.requests[-1].prompt_ids)
    assert [entry["token"] for entry in entries] == ["a", "b"]
    for place, (token_id, entry) in enumerate(zip(b"ab", entries, strict=True), start):
        own, named = fake_named(token_id, place, [65, 7, 256, 97])
        wanted = [(token_id, own), *(pair for pair in named if pair[0] != token_id)]
        told = [(likely["token"], likely["logprob"]) for likely in entry["top_logprobs"]]
        assert told == [(name_of(other), value) for other, value in wanted]
        assert entry["logprob"] == own
    assert plane.engine.requests[-1].sampling.logprob_token_ids == (65, 7, 256, 97)


def test_logprobs_of_named_tokens_in_completions(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="a"), Reply(text="a"))
    fields: Any = {"prompt": "hi", "logprobs": 0, "logprob_token_ids": NAMED, "n": 2, "max_tokens": 1}
    plain = post(plane, TEXT, **fields).json()["choices"]
    own, named = fake_named(97, 2, [65, 7, 256])
    for choice in plain:
        assert choice["logprobs"]["token_logprobs"] == [own]
        assert choice["logprobs"]["top_logprobs"] == [
            {"a": own} | {name_of(other): value for other, value in named}
        ]
    # An echo is told of as it is without.
    plane.engine.script(Reply(text="a"))
    (choice,) = post(plane, TEXT, **{**fields, "n": 1}, echo=True).json()["choices"]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 1, 4]


@BOTH
def test_refused_named_tokens(plane: DataPlane, kind: Any) -> None:
    wrong = ("logprob_token_ids", "invalid_value")
    asked = {"logprobs": True if kind is CHAT else 1}
    for value in ([], [1] * 129, [VOCAB_SIZE], [1 << 31], [-1], [1.0], [True], ["1"], "1", 5, {"1": 1}):
        param, code = refused(plane, kind, **asked, logprob_token_ids=value)
        assert (param.split("[")[0], code) == wrong, value
    for unasked in ({}, {"logprobs": None}, {"logprobs": False}):
        assert refused(plane, kind, **unasked, logprob_token_ids=[5]) == wrong
    if kind is TEXT:
        scored = {"logprobs": 1, "echo": True, "max_tokens": 0}
        assert refused(plane, kind, **scored, logprob_token_ids=[5]) == wrong
    assert plane.engine.requests == []
    assert post(plane, kind, **asked, logprob_token_ids=[VOCAB_SIZE - 1] * 128).status_code == 200


# Token ids.


@pytest.mark.parametrize("n", [1, 2])
def test_token_ids_of_whole_answers(plane: DataPlane, n: int) -> None:
    plane.engine.script(*[Reply(text="⚓ok", chunk=2)] * 3 * n)
    whole = post(plane, CHAT, return_token_ids=True, n=n).json()
    assert whole["prompt_token_ids"] == list(plane.engine.requests[0].prompt_ids)
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*"⚓ok".encode(), EOS_ID]] * n
    whole = post(plane, TEXT, return_token_ids=True, n=n, echo=True).json()
    told = [choice["prompt_token_ids"] for choice in whole["choices"]]
    assert told == [list(prompt) for prompt in (b"hi", b"hello") for _ in range(n)]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[*"⚓ok".encode(), EOS_ID]] * 2 * n
    assert whole["choices"][0]["text"] == "hi⚓ok"
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])


@BOTH
@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1, "echo": True}, {"stop": "k!"}, {"n": 2}])
def test_token_ids_of_streams(plane: DataPlane, kind: Any, chunk: int, fields: Any) -> None:
    """Those that came with each chunk, shown or not: what a stop string takes away is among them."""
    if kind is CHAT and "echo" in fields:
        fields = {"logprobs": True}
    plane.engine.script(*[Reply(text="a⚓ok!x", chunk=chunk)] * 4)
    told = chunks(
        plane, kind, **fields, return_token_ids=True, stream_options={"continuous_usage_stats": True}
    )
    last = told.pop()
    assert last["choices"] == []
    ids: dict[int, list[int]] = {}
    for each in told:
        (choice,) = each["choices"]
        if kind is CHAT:
            begins = "role" in choice["delta"]
            assert ("prompt_token_ids" in each) == begins
            assert not begins or each["prompt_token_ids"] == list(plane.engine.requests[0].prompt_ids)
        else:
            begins = choice["index"] not in ids
            prompt = list((b"hi", b"hello")[choice["index"] // fields.get("n", 1)])
            assert choice["prompt_token_ids"] == (prompt if begins else None)
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert len(ids[choice["index"]]) == each["usage"]["completion_tokens"]
    assert len(ids) == len(plane.engine.requests)
    text = [*"a⚓ok!".encode()]
    assert set(map(tuple, ids.values())) == {tuple(text if "stop" in fields else [*text, ord("x"), EOS_ID])}
    assert sum(map(len, ids.values())) == last["usage"]["completion_tokens"]


@BOTH
def test_refused_token_ids(plane: DataPlane, kind: Any) -> None:
    for value in (1, "true", [True]):
        assert refused(plane, kind, return_token_ids=value) == ("return_token_ids", "invalid_value")
    assert "token_ids" not in post(plane, kind, return_token_ids=False).text


# Together, and too many.


def test_all_at_once(plane: DataPlane) -> None:
    fields = {"prompt_logprobs": 2, "return_token_ids": True, "logprob_token_ids": [5]}
    whole = post(plane, CHAT, **fields, logprobs=True, n=2).json()
    assert whole.keys() >= {"prompt_logprobs", "prompt_token_ids"}
    (choice, _) = whole["choices"]
    assert len(choice["logprobs"]["content"]) + 1 == len(choice["token_ids"]) == 3
    whole = post(plane, TEXT, **fields, logprobs=1, echo=True, n=2).json()
    for choice in whole["choices"]:
        assert choice.keys() >= {"prompt_logprobs", "prompt_token_ids", "token_ids"}
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (TEXT, {"prompt": ["x" * 3000] * 16, "prompt_logprobs": 0, "n": 11}, "prompt_logprobs"),
        (TEXT, {"prompt": ["x" * 3000] * 9, "prompt_logprobs": 20, "n": 1}, "prompt_logprobs"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1] * 128, "max_tokens": 4034}, "logprob_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": 0, "logprob_token_ids": [1] * 120, "n": 16, "max_tokens": 300},
         "logprob_token_ids"),
        (TEXT, {"prompt": ["x" * 4000] * 16, "n": 16, "return_token_ids": True, "prompt_logprobs": 0},
         "prompt_logprobs"),
    ],
)  # fmt: skip
def test_an_answer_that_could_hold_too_many(plane: DataPlane, kind: Any, fields: Any, param: str) -> None:
    assert refused(plane, kind, **{"max_tokens": 1, **fields}) == (param, "invalid_value")
    assert plane.engine.requests == []
    assert plane.limiter.reserved == {}


def test_token_ids_are_counted_as_well(plane: DataPlane) -> None:
    most = MAX_MODEL_LEN * 16 * 16 * 2 // TOKEN_IDS_A_LOGPROB
    assert most < MAX_LOGPROBS, "nobody is refused for token ids alone at this length"
    answer = post(plane, TEXT, prompt=["x" * (MAX_MODEL_LEN - 1)] * 16, max_tokens=1, return_token_ids=True)
    assert answer.status_code == 200
    assert [len(choice["prompt_token_ids"]) for choice in answer.json()["choices"]] == [
        MAX_MODEL_LEN - 1
    ] * 16
