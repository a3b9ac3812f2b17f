"""The interface's rules on requests, streams and errors, a test each; the tables behind them are in test_fields.py,
test_bodies.py and tests/docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from loraplex.api.openai.messages import UNSUPPORTED_MESSAGE
from loraplex.api.openai.strict import EMPTY, MAX_EMPTY, NEUTRAL
from loraplex.serving.text.processor import TextProcessor
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane, running_data_plane
from support.models.byte_tokenizer import write_byte_tokenizer

KEY = {"authorization": "Bearer lpx_acme"}
CHAT: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": BASE, "prompt": "hi"}
BOTH = pytest.mark.parametrize(("route", "body"), [("chat/completions", CHAT), ("completions", TEXT)])


def post(plane: DataPlane, route: str, body: Any) -> httpx.Response:
    return plane.http.post(f"{plane.url}/v1/{route}", json=body, headers=KEY)


def error(answer: httpx.Response) -> dict[str, Any]:
    """All four, always."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert isinstance(body["error"]["type"], str)
    assert body["error"]["code"] is None or isinstance(body["error"]["code"], str)
    return dict(body["error"])


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


@pytest.mark.parametrize("role", ["king", "function", "", None, 5])
def test_no_other_roles(plane: DataPlane, role: Any) -> None:
    answer = post(plane, "chat/completions", {**CHAT, "messages": [{"role": role, "content": "x"}]})
    assert (answer.status_code, error(answer)["param"]) == (400, "messages[0].role")


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}],
)
def test_both_names_of_the_length(plane: DataPlane, fields: dict[str, int]) -> None:
    plane.engine.script(Reply(text="abcdef"))
    answer = post(plane, "chat/completions", {**CHAT, **fields}).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.5),
        ("stop_token_ids", [7]),
        ("ignore_eos", True),
        ("min_tokens", 2),
        ("priority", 3),
        ("speculation", False),
    ],
)
def test_fields_beyond_openais(plane: DataPlane, route: str, body: Any, field: str, value: Any) -> None:
    assert post(plane, route, {**body, field: value}).status_code == 200
    request = plane.engine.requests[-1]
    told = getattr(request if field in ("priority", "speculation") else request.sampling, field)
    assert told == (tuple(value) if isinstance(value, list) else value)


def test_neutral_values_of_fields_of_messages_that_are_not_supported_pass(plane: DataPlane) -> None:
    assert NEUTRAL == (None, False, [], {}, "auto")
    for value in NEUTRAL:
        message = {**CHAT["messages"][0], **dict.fromkeys(UNSUPPORTED_MESSAGE, value)}
        assert post(plane, "chat/completions", {**CHAT, "messages": [message]}).status_code == 200


UNKNOWN = pytest.mark.parametrize(
    ("route", "change", "param"),
    [
        ("chat/completions", {}, "tempature"),
        ("completions", {}, "lora_path"),
        ("chat/completions", {"stream": True, "stream_options": ...}, "stream_options.usage_stats"),
        ("completions", {"stream": True, "stream_options": ...}, "stream_options.usage_stats"),
        ("chat/completions", {"messages": ...}, "messages[0].weight"),
        ("chat/completions", {"messages": [...]}, "messages[0].content[0].cache_control"),
    ],
)


def with_unknown(route: str, change: dict[str, Any], param: str, fields: dict[str, Any]) -> Any:
    """A body with `fields` in the object that `param` names one of."""
    body = {**(CHAT if route.startswith("chat") else TEXT), **change}
    if "stream_options" in change:
        body["stream_options"] = {"include_usage": True, **fields}
    elif change.get("messages") is ...:
        body["messages"] = [{**CHAT["messages"][0], **fields}]
    elif "messages" in change:
        body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "x", **fields}]}]
    else:
        body |= fields
    return body


@pytest.mark.parametrize("value", [False, True, "auto", "", 0, 1, "x", [None], {"x": None}])
@UNKNOWN
def test_any_unknown_field_is_a_400_that_names_it(
    plane: DataPlane, route: str, change: dict[str, Any], param: str, value: Any
) -> None:
    """Of whatever value that could ask for something: nothing is silently ignored."""
    name = param.rpartition(".")[2]
    answer = post(plane, route, with_unknown(route, change, param, {name: value}))
    told = error(answer)
    assert (answer.status_code, told["code"], told["param"]) == (400, "unsupported_field", param)
    assert name in told["message"]
    assert plane.engine.requests == []


@UNKNOWN
def test_empty_values_of_unknown_fields_pass(
    plane: DataPlane, route: str, change: dict[str, Any], param: str
) -> None:
    name = param.rpartition(".")[2]
    for value in (None, [], {}):
        answer = post(plane, route, with_unknown(route, change, param, {name: value}))
        assert answer.status_code == 200, (value, answer.text)
    assert EMPTY == (None, [], {})
    many = {f"{name}_{i}": EMPTY[i % 3] for i in range(MAX_EMPTY)}
    assert post(plane, route, with_unknown(route, change, param, many)).status_code == 200
    many |= {f"{name}_{i}": None for i in range(5000)}
    answer = post(plane, route, with_unknown(route, change, param, many))
    assert (answer.status_code, error(answer)["code"]) == (400, "unsupported_field")


def test_tools_that_are_not_to_be_called_are_shown_to_the_template(plane: DataPlane, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"x": {"default": None}}}
    tool = {"type": "function", "function": {"name": "f<|end|>", "parameters": parameters, "strict": None}}
    template = "{{ tools | tojson }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = write_byte_tokenizer(tmp_path, chat_template=template)
    text = TextProcessor(model, max_model_len=MAX_MODEL_LEN)
    with running_data_plane(tmp_path / "other", text=text) as shown:
        answer = post(shown, "chat/completions", {**CHAT, "tools": [tool], "tool_choice": "none"})
        assert answer.status_code == 200
        prompt = shown.engine.requests[-1].prompt_ids
        assert (
            post(shown, "chat/completions", {**CHAT, "tools": [], "tool_choice": "none"}).status_code == 200
        )
        assert bytes(shown.engine.requests[-1].prompt_ids).startswith(b"null")
    told, _ = json.JSONDecoder().raw_decode(bytes(prompt).decode())
    assert told == [{"type": "function", "function": {"name": "f<|end|>", "parameters": parameters}}]


@BOTH
def test_a_stream_ends_in_done(plane: DataPlane, route: str, body: Any) -> None:
    chunks = events(post(plane, route, {**body, "stream": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all("usage" not in chunk for chunk in chunks)


@BOTH
@pytest.mark.parametrize("n", [1, 2])
def test_include_usage_adds_the_usage_chunk(plane: DataPlane, route: str, body: Any, n: int) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "n": n}
    *chunks, last = events(post(plane, route, {**body, **options}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == post(plane, route, {**body, "n": n}).json()["usage"]


@BOTH
def test_an_error_after_the_first_byte(plane: DataPlane, route: str, body: Any) -> None:
    plane.engine.script(Reply(text="abc", error=("engine_restarting", "the engine process died")))
    answer = post(plane, route, {**body, "stream": True})
    assert answer.status_code == 200
    *_, last = events(answer)
    assert set(last) == {"error"}
    assert last["error"]["code"] == "engine_restarting"
    assert set(last["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/embeddings", None, 405),
        ("GET", "/v1/completions", None, 405),
        ("DELETE", "/v1/models", None, 405),
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b"", 400),
        ("POST", "/v1/chat/completions", b'{"model": "x"}', 400),
        ("POST", "/v1/completions", b'{"model": "nobody", "prompt": "x"}', 404),
    ],
)
def test_errors_have_all_four_wherever_they_come_from(
    plane: DataPlane, method: str, path: str, content: bytes | None, status: int
) -> None:
    answer = plane.http.request(method, f"{plane.url}{path}", content=content, headers=KEY)
    assert answer.status_code == status
    assert error(answer)
