"""Tinker's wire: samples are submitted and asked for, and answered in its protocol buffers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.codec import dumps
from loraplex.api.drain import Drain
from loraplex.api.routes.tinker import TRAINING
from loraplex.api.tinker import samples
from support.engine.fake_engine import Reply
from support.http.data_plane import DataPlane, principal, running_data_plane
from support.waiting import eventually

PROMPT = list(b"hello")
LENGTH, STOP = 1, 0
"""Stop reasons."""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DataPlane]:
    """A data plane that the test may drain."""
    with running_data_plane(tmp_path / "model") as running:
        yield running


def client(plane: DataPlane, key: str = "lpx_acme") -> httpx.Client:
    return httpx.Client(base_url=f"{plane.url}/api/v1", headers={"x-api-key": f"tml-{key}"}, timeout=60)


def sample(**changes: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 8, **changes.pop("sampling_params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    return {"prompt": prompt, "base_model": "org/tiny", "sampling_params": sampling, **changes}


def fields(data: bytes) -> list[tuple[int, Any]]:
    """The fields of a protocol buffer: numbers and bytes."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = varint()
        value: Any = varint()
        if tag & 7 == 2:
            at, value = at + value, data[at : at + value]
        found.append((tag >> 3, value))
    return found


def numbers(data: bytes, kind: str) -> list[Any]:
    return list(struct.unpack(f"<{len(data) // 4}{kind}", data))


def sequences(data: bytes) -> list[dict[str, Any]]:
    found = []
    for number, value in fields(data):
        if number == 1:
            parts = dict(fields(value))
            tokens, logprobs = numbers(parts[2], "i"), numbers(parts[3], "f")
            found.append({"reason": parts[1], "tokens": tokens, "logprobs": logprobs})
    return found


def submitted(http: httpx.Client, **changes: Any) -> str:
    answer = http.post("/asample", json=sample(**changes))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def result(http: httpx.Client, request_id: str) -> httpx.Response:
    return http.post("/retrieve_future", json={"request_id": request_id})


def refused(answer: httpx.Response, status: int, code: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return str(error["message"])


def test_samples_have_all_their_tokens_and_those_of_the_stop_string(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="hello world")
    with client(plane) as http:
        options = {"num_samples": 2, "sampling_params": {"max_tokens": 20, "seed": 3, "stop": ["lo w"]}}
        answer = result(http, submitted(http, prompt_logprobs=True, **options))
        assert answer.headers["content-type"] == "application/x-protobuf"
        both = sequences(answer.content)
        assert [bytes(one["tokens"]).decode() for one in both] == ["hello w"] * 2
        assert [one["reason"] for one in both] == [STOP] * 2
        assert all(len(one["logprobs"]) == 7 for one in both)
        prompt = numbers(dict(fields(answer.content))[2], "f")
        assert len(prompt) == len(PROMPT)
        assert math.isnan(prompt[0])
        assert not any(math.isnan(value) for value in prompt[1:])
        (one,) = sequences(result(http, submitted(http, sampling_params={"max_tokens": 3})).content)
        assert (bytes(one["tokens"]).decode(), one["reason"]) == ("hel", LENGTH)


def test_the_engine_gets_what_a_sample_asks_for(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="hello", eos=False)
    options = {"seed": 7, "top_k": 5, "top_p": 0.5, "temperature": 0.25, "stop": [ord("o")]}
    with client(plane) as http:
        answer = result(http, submitted(http, topk_sample_logprobs=2, sampling_params=options))
    given = plane.engine.requests[-1].sampling
    assert (given.seed, given.top_k, given.top_p, given.temperature) == (7, 5, 0.5, 0.25)
    assert list(given.stop_token_ids) == [ord("o")]
    (one,) = sequences(answer.content)
    assert (bytes(one["tokens"]).decode(), one["reason"], len(one["logprobs"])) == ("hello", STOP, 5)
    top = dict(fields(dict(fields(dict(fields(answer.content))[1]))[4]))
    assert (top[3], top[4]) == (2, 5)
    assert len(numbers(top[1], "i")) == len(numbers(top[2], "f")) == 10


def test_log_probabilities_are_those_of_completions(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="hello world")
    with client(plane) as http:
        body = result(http, submitted(http, prompt_logprobs=True)).content
        asked = {"model": "org/tiny", "prompt": PROMPT, "max_tokens": 8, "echo": True, "logprobs": 0}
        headers = {"authorization": "Bearer lpx_acme"}
        answer = http.post(f"{plane.url}/v1/completions", json=asked, headers=headers)
    expected = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    (one,) = sequences(body)
    assert [*numbers(dict(fields(body))[2], "f")[1:], *one["logprobs"]] == pytest.approx(expected[1:])


def test_a_session_stays_with_the_version_that_its_path_named(plane: DataPlane) -> None:
    with client(plane) as http:
        for version, served in (("v1", "v1"), ("latest", "v2")):
            asked = {
                "session_id": "session-1",
                "sampling_session_seq_id": 0,
                "model_path": f"tinker://pirate/sampler_weights/{version}",
            }
            made = http.post("/create_sampling_session", json=asked)
            assert made.status_code == 200, made.text
            session = made.json()["sampling_session_id"]
            shown = http.get(f"/samplers/{session}").json()
            assert shown["model_path"] == f"tinker://pirate/sampler_weights/{served}"
            body = sample(sampling_session_id=session)
            del body["base_model"]
            request_id = http.post("/asample", json=body).json()["request_id"]
            assert sequences(result(http, request_id).content)
            assert plane.engine.requests[-1].adapter.version == int(served[1:])


def test_what_is_not_the_tenants_is_unknown(plane: DataPlane) -> None:
    with client(plane) as http, client(plane, "lpx_rival") as rival:
        foreign = {"base_model": None, "model_path": "tinker://secret/sampler_weights/v1"}
        asked = {"session_id": "s", "sampling_session_seq_id": 0, **foreign}
        told = refused(http.post("/create_sampling_session", json=asked), 404, "model_not_found")
        unknown = asked | {"model_path": "tinker://nobody/sampler_weights/v1"}
        assert refused(http.post("/create_sampling_session", json=unknown), 404, "model_not_found") == told
        request_id = submitted(http)
        refused(result(rival, request_id), 410, "future_gone")
        assert rival.post("/cancel_future", json={"request_id": request_id}).status_code == 200
        assert sequences(result(http, request_id).content)
        # It is given once.
        eventually(lambda: result(http, request_id).status_code == 410)


def test_verbs_that_train_are_refused_by_name(plane: DataPlane) -> None:
    with client(plane) as http:
        for verb in TRAINING:
            for path in (verb, f"{verb}/model-1"):
                told = refused(http.post(f"/{path}", json={}), 404, "unknown_url")
                assert f"'{path}'" in told
                assert "does not train" in told
        for path in ("dream", "dream/forward"):
            assert "no such verb" in refused(http.post(f"/{path}", json={}), 404, "unknown_url")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 129}, "num_samples"),
        ({"sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"sampling_params": {"stop": ["a", 1]}}, "sampling_params.stop"),
        ({"prompt": {"chunks": []}}, "prompt.chunks"),
        ({"model_path": "tinker://../sampler_weights/v1"}, "model_path"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
    ids=str,
)
def test_what_a_sample_may_not_say_is_refused_at_once(
    plane: DataPlane, changes: dict[str, Any], param: str
) -> None:
    with client(plane) as http:
        answer = http.post("/asample", json=sample(**changes))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_field_that_is_said_twice_is_what_it_says_last(plane: DataPlane) -> None:
    body = dumps(sample(num_samples=2)).replace(b'"num_samples"', b'"num_samples":"x","num_samples"')
    with client(plane) as http:
        answer = http.post("/asample", content=body, headers={"content-type": "application/json"})
        assert len(answer.json()["sample_sequence_ids"]) == 2
        assert len(sequences(result(http, answer.json()["request_id"]).content)) == 2


def test_a_session_is_finished(plane: DataPlane) -> None:
    with client(plane) as http:
        body = {"reason": {"type": "success"}, "detail": None}
        assert http.post("/sessions/session-1/finish", json=body).status_code == 200


def test_a_token_id_out_of_range_is_told_with_the_result(plane: DataPlane) -> None:
    with client(plane) as http:
        wrong = {"chunks": [{"type": "encoded_text", "tokens": [99999]}]}
        answer = result(http, submitted(http, prompt=wrong))
    assert answer.json()["category"] == "user"
    assert "99999" in answer.json()["error"]


def test_a_sample_that_is_cancelled_ends(plane: DataPlane) -> None:
    plane.engine.default = Reply(text="hello world", hold=True, hold_after=2)
    with client(plane) as http:
        request_id = submitted(http)
        assert http.post("/cancel_future", json={"request_id": request_id}).status_code == 200
        eventually(lambda: result(http, request_id).status_code == 410)


def test_a_sample_that_nobody_asks_for_ends(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "UNASKED_S", 0.05)
    plane.engine.default = Reply(text="hello world", hold=True, hold_after=2)
    with client(plane) as http:
        request_id = submitted(http)
        eventually(lambda: len(plane.engine.aborted) == 1)
        refused(result(http, request_id), 410, "future_gone")


def test_a_result_that_nobody_takes_is_gone(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "KEPT_S", 0.05)
    plane.engine.default = Reply(text="hello world")
    with client(plane) as http:
        request_id = submitted(http)
        eventually(lambda: not plane.on_loop(lambda: plane.drain.in_flight))
        refused(result(http, request_id), 410, "future_gone")


def test_a_drain_waits_for_no_sample_whose_result_nobody_can_ask_for(own: DataPlane) -> None:
    """One that is done, one that runs, and one that is asked for, which is answered."""
    own.engine.default = Reply(text="hello world")
    with client(own) as http, client(own) as asking, ThreadPoolExecutor(1) as pool:
        submitted(http)
        eventually(lambda: len(own.engine.requests) == 1 and not own.on_loop(lambda: own.engine.live))
        own.engine.default = Reply(text="hello world", hold=True, hold_after=2)
        submitted(http)
        wanted = submitted(http)
        waiting = pool.submit(result, asking, wanted)
        eventually(lambda: own.on_loop(lambda: own.drain.in_flight) == 4)
        own.on_loop(own.drain.refuse)
        eventually(lambda: len(own.engine.aborted) == 1)
        refused(result(http, wanted), 503, "draining")
        own.on_loop(own.engine.release)
        assert sequences(waiting.result(30).content)
    assert own.server.call(lambda: own.drain.wait_idle(10)) is True


def test_a_key_has_so_many_samples_at_once(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SAMPLES_A_KEY", 2)
    plane.engine.default = Reply(text="hello world", hold=True, hold_after=2)
    with client(plane) as http, client(plane, "lpx_rival") as rival:
        ids = [submitted(http), submitted(http)]
        refused(http.post("/asample", json=sample()), 429, "rate_limit_exceeded")
        others = submitted(rival)
        for request_id in ids:
            http.post("/cancel_future", json={"request_id": request_id})
        rival.post("/cancel_future", json={"request_id": others})


def test_samples_of_many_keys_leave_their_tenant_room_to_ask(tmp_path: Path) -> None:
    """A tenant alone has half of the requests in flight, and half of that for samples."""
    with running_data_plane(tmp_path / "model", drain=Drain(max_in_flight=16)) as own:
        for number in range(3):
            mine = principal("acme", key_id=f"key-{number}")
            own.authenticator.principals[f"lpx_acme{number}"] = mine
        own.engine.default = Reply(text="hello world", hold=True, hold_after=2)
        keys = [client(own, f"lpx_acme{number}") for number in range(3)]
        ids = [(key, submitted(key)) for key in (keys[0], keys[0], keys[1], keys[1])]
        told = refused(keys[2].post("/asample", json=sample()), 429, "rate_limit_exceeded")
        assert "4 samples" in told
        with ThreadPoolExecutor(4) as pool:
            asked = [
                pool.submit(result, client(own, f"lpx_acme{index // 2}"), ids[index][1]) for index in range(4)
            ]
            eventually(lambda: own.on_loop(lambda: own.drain.in_flight) == 8)
            own.on_loop(own.engine.release)
            assert all(sequences(each.result(30).content) for each in asked)
        own.engine.default = Reply(text="hello world")
        assert sequences(result(keys[2], submitted(keys[2])).content)
        own.settle_all()
