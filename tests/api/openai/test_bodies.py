"""What a request may say: every field of OpenAI's types, every kind of wrong value, and bodies that are none."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.api.openai.schemas import ChatRequest, CompletionRequest
from support.engine.fake_engine import VOCAB_SIZE
from support.http.data_plane import BASE, DataPlane

CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": BASE, "prompt": "hi"}
KEY = {"Authorization": "Bearer lpx_acme"}


def post(plane: DataPlane, body: Any, route: str = "chat/completions", **options: Any) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return plane.http.post(f"{plane.url}/v1/{route}", **content, headers=KEY, **options)


def check_refused(answer: httpx.Response, param: str | None, code: str = "invalid_value") -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0},
        {"n": 1, "modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "none"},
        {"stream_options": None, "stop": None, "temperature": None, "logit_bias": None, "metadata": None},
        {"stream_options": {}, "stop": [], "logit_bias": {}, "max_tokens": None, "user": None},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"service_tier": "default", "store": False, "metadata": {"k": "v"}, "user": "somebody"},
        {"temperature": 2, "top_p": 1, "min_p": 1, "frequency_penalty": -2, "presence_penalty": 2},
    ],
)
def test_neutral_and_extreme_values_pass(plane: DataPlane, fields: dict[str, Any]) -> None:
    answer = post(plane, {**CHAT, **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 1 << 63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "5"}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"priority": 1001}, "priority"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [1]}, "messages[0]"),
    ],
)
def test_wrong_values_are_refused_by_name(plane: DataPlane, fields: dict[str, Any], param: str) -> None:
    check_refused(post(plane, {**CHAT, **fields}), param)
    assert plane.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"frobnicate": False}, "frobnicate"),
        ({"prompt": "x"}, "prompt"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"messages": [{"role": "user", "content": "x", "mood": "?"}]}, "messages[0].mood"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"x": 1}]}]},
            "messages[0].tool_calls[0].x",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image_url"}]}
                ]
            },
            "messages[0].content[1].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]},
            "messages[0].content[0].x",
        ),
    ],
)
def test_unknown_fields_are_refused_by_name(plane: DataPlane, fields: dict[str, Any], param: str) -> None:
    check_refused(post(plane, {**CHAT, **fields}), param, "unsupported_field")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [[]],
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        [True],
        [1.0],
        [-1],
        [VOCAB_SIZE],
        {},
        5,
        None,
        ["x"] * 17,
        [[1]] * 17,
        [[[1]]],
    ],
)
def test_wrong_prompts(plane: DataPlane, prompt: Any) -> None:
    check_refused(post(plane, {"model": BASE, "prompt": prompt}, "completions"), "prompt")


def test_missing_fields(plane: DataPlane) -> None:
    assert "'model'" in check_refused(post(plane, {"messages": CHAT["messages"]}), "model")
    check_refused(post(plane, {"model": BASE}), "messages")
    check_refused(post(plane, {"model": BASE}, "completions"), "prompt")


def test_roles_and_text_parts_reach_the_template(plane: DataPlane) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "c", "tool_calls": [], "refusal": None},
        {"role": "tool", "content": "t", "tool_call_id": "call_1"},
    ]
    assert post(plane, {"model": BASE, "messages": messages}).status_code == 200
    text = bytes(i for i in plane.engine.requests[0].prompt_ids if i < 256).decode()
    assert (
        text
        == "system\ns\n" + "system\nd\n" + "user\na\nb\n" + "assistant\nc\n" + "tool\nt\n" + "assistant\n"
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'{"model": "x"} x',
        b'{"seed": ' + b"9" * 100_000 + b"}",
        b"\x1f\x8b\x08\x00",
    ],
)
def test_bodies_that_are_not_json_objects(plane: DataPlane, body: bytes) -> None:
    check_refused(post(plane, body), None)


def test_numbers_beyond_floats(plane: DataPlane) -> None:
    for number in ("1e999", "-1e999", "9" * 4000):
        body = f'{{"model": "{BASE}", "prompt": "x", "temperature": {number}}}'.encode()
        check_refused(post(plane, body, "completions"), "temperature")
        body = f'{{"model": "{BASE}", "prompt": "x", "logit_bias": {{"1": {number}}}}}'.encode()
        check_refused(post(plane, body, "completions"), "logit_bias")


def test_wrong_token_ids_of_logit_bias_are_named_together(plane: DataPlane) -> None:
    bias = {"1": 5, "bad1": 5, "-2": 5, "\n" + "x" * 99: 5, "": 5, "bad5": 5}
    message = check_refused(post(plane, {**TEXT, "logit_bias": bias}, "completions"), "logit_bias")
    assert "'bad1', '-2', '?xxx" in message
    assert message.endswith("xxx', ''.")
    assert len(message) < 200
    assert "bad5" not in message


def test_a_token_id_beyond_the_vocabulary_is_named(plane: DataPlane) -> None:
    for field, value in (("logit_bias", {"1": 1, str(VOCAB_SIZE + 7): 1}), ("prompt", [1, VOCAB_SIZE + 7])):
        message = check_refused(post(plane, {**TEXT, field: value}, "completions"), field)
        assert message == f"'{field}' has token id {VOCAB_SIZE + 7}, beyond the model's {VOCAB_SIZE} tokens."


def test_last_value_of_a_duplicate_key_counts(plane: DataPlane) -> None:
    body = f'{{"model": "nothing", "prompt": "x", "model": "{BASE}"}}'.encode()
    assert post(plane, body, "completions").status_code == 200


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_token": 3}, "Unknown field: 'max_token', did you mean 'max_tokens'?"),
        ({"temprature": 0.5}, "Unknown field: 'temprature', did you mean 'temperature'?"),
        ({"stream": True, "stream_options": {"include_usag": True}}, "did you mean 'include_usage'?"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": "y"}]}]}, "'text'?"),
        ({"frobnicate": 1}, "Unknown field: 'frobnicate'."),
        ({"max_tokens" * 50_000: 1}, "…"),
    ],
)
def test_an_unknown_field_names_the_one_that_is_like_it(
    plane: DataPlane, fields: dict[str, Any], told: str
) -> None:
    message = post(plane, {**CHAT, **fields}).json()["error"]["message"]
    assert message.endswith(told) if told != "…" else "did you mean" not in message


def test_a_body_of_strange_keys_costs_one_error(plane: DataPlane) -> None:
    body = {f"k{i}": i for i in range(200_000)}
    assert len(check_refused(post(plane, body), "k0", "unsupported_field")) < 300
    check_refused(post(plane, {"model": BASE, "messages": [body]}), "messages[0].k0", "unsupported_field")


def test_long_names_and_control_characters_are_cut_and_masked(plane: DataPlane) -> None:
    name = "a\x00\x1b[31m\u202e" + "b" * 10_000
    answer = post(plane, {**CHAT, name: 1})
    param = answer.json()["error"]["param"]
    assert len(param) <= 128
    assert param.isprintable()


def test_a_compressed_body_is_refused(plane: DataPlane) -> None:
    headers = {**KEY, "Content-Encoding": "gzip"}
    check_refused(httpx.post(f"{plane.url}/v1/completions", content=b"x", headers=headers), None)


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_json_is_read_as_json_alone(plane: DataPlane, route: str) -> None:
    body = json.dumps(CHAT if route.startswith("chat") else TEXT).encode()

    def status(kind: str | None) -> int:
        headers = {**KEY} if kind is None else {**KEY, "Content-Type": kind}
        answer = plane.http.post(f"{plane.url}/v1/{route}", content=body, headers=headers)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["code"], error["param"]) == ("unsupported_media_type", "Content-Type")
            assert error["type"] == "invalid_request_error"
            assert "application/json" in error["message"]
        return answer.status_code

    for kind in (
        None,
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "application/vnd.api+json",
    ):
        assert status(kind) == 200, kind
    before = len(plane.engine.requests)
    for kind in (
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "text/json",
        "application/jsonp",
        "application/json5; x=application/json",
        "multipart/form-data; boundary=x",
        "application/+json",
        "x" * 8000,
    ):
        assert status(kind) == 415, kind
    assert len(plane.engine.requests) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*ChatRequest.model_fields, *ChatRequest.UNSUPPORTED, *CompletionRequest.model_fields, "zzz"})
SENSIBLE = st.sampled_from([0, 1, -1, 2, 0.5, 1.0, True, False, None, "x", ["x"], [1], {}, {"1": 1}, "auto"])
PARTS = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "x"]), "text": JSON}), max_size=3
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "tool", "assistant", "x"]),
            "content": st.text() | PARTS | JSON,
        },
        optional={"name": JSON, "tool_call_id": JSON, "refusal": JSON},
    ),
    max_size=3,
)
PROMPTS = st.text() | st.lists(st.text()) | st.lists(st.integers(0, 300)) | JSON
FIELDS = st.dictionaries(st.sampled_from(NAMES), SENSIBLE | JSON, max_size=4)


def never_a_server_error(max_examples: int) -> Any:
    @settings(max_examples=max_examples, deadline=None, database=None, derandomize=True)
    @given(fields=FIELDS, messages=MESSAGES, prompt=PROMPTS, chat=st.booleans())
    def check(plane: DataPlane, fields: dict[str, Any], messages: Any, prompt: Any, chat: bool) -> None:
        body = {"model": BASE, **({"messages": messages} if chat else {"prompt": prompt}), **fields}
        route = "chat/completions" if chat else "completions"
        answer = plane.http.post(f"{plane.url}/v1/{route}", content=json.dumps(body).encode(), headers=KEY)
        assert answer.status_code in (200, 400, 404), (answer.text, body)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    return check


def test_no_body_is_ever_a_server_error(plane: DataPlane) -> None:
    never_a_server_error(50)(plane=plane)


@pytest.mark.soak
def test_no_body_is_ever_a_server_error_at_length(plane: DataPlane) -> None:
    never_a_server_error(5000)(plane=plane)
