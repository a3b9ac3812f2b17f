"""The official Anthropic client against /v1/messages over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from loraplex.api.drain import DrainPhase
from loraplex.control.errors import QuotaSpent, RateLimited
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, MAX_MODEL_LEN, DataPlane
from support.http.events import read_events

HI: Any = [{"role": "user", "content": "hi"}]
HI_TOKENS = len("<user\nhi>\n<assistant\n")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def client(plane: DataPlane) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=plane.url, api_key="lpx_acme", max_retries=0) as made:
        yield made


def events_of(plane: DataPlane, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": BASE, "max_tokens": 99, "messages": HI, "stream": True, **fields}
    answer = plane.http.post(f"{plane.url}/v1/messages", json=body, headers={"x-api-key": "lpx_acme"})
    assert answer.status_code == 200, answer.text
    found = read_events(answer.text)
    told = [json.loads(data) for _, data in found]
    assert [name for name, _ in found] == [event["type"] for event in told]
    for event in told:
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
    return told


def test_a_whole_answer(plane: DataPlane, client: anthropic.Anthropic) -> None:
    plane.engine.script(Reply(text="Hello wörld", adapter_state="warm", cached_tokens=16))
    raw = client.messages.with_raw_response.create(
        model="pirate", max_tokens=100, messages=HI, system="Be brief.", metadata={"user_id": "u"}
    )
    answer = raw.parse()
    Message.model_validate_json(raw.text())
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "pirate")
    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello wörld")]  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = len("<system\nBe brief.>\n") + HI_TOKENS
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (prompt - 16, 16)
    assert answer.usage.cache_creation_input_tokens == 0
    assert answer.usage.output_tokens == len("Hello wörld".encode()) + 1
    assert raw.headers["x-loraplex-adapter"] == "pirate@v2"
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert plane.resolver.users[-1] == "u"
    assert plane.ledger.rows[-1].endpoint == "/v1/messages"


def test_a_stream_has_each_event_in_its_place(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Hé", cached_tokens=3))
    told = events_of(plane)
    assert [event["type"] for event in told] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = told[0]["message"], told[-2]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == HI_TOKENS
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == ("end_turn", None)
    assert end["usage"] == {
        "input_tokens": HI_TOKENS - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": len("Hé".encode()) + 1,
        "output_tokens_details": {"thinking_tokens": 0},
        "server_tool_use": None,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_is_told(plane: DataPlane, client: anthropic.Anthropic, stream: bool) -> None:
    plane.engine.script(Reply(text="one two three"))
    asked: Any = {"model": BASE, "max_tokens": 99, "messages": HI, "stop_sequences": ["xy", " thr", "tw!"]}
    if stream:
        with client.messages.stream(**asked) as streamed:
            answer: Any = streamed.get_final_message()
    else:
        answer = client.messages.create(**asked)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " thr")
    assert answer.content[0].text == "one two"


def test_a_length_that_is_reached_and_one_that_the_context_cuts(
    plane: DataPlane, client: anthropic.Anthropic
) -> None:
    plane.engine.script(Reply(text="too long"))
    answer = client.messages.create(model=BASE, max_tokens=3, messages=HI)
    assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "too")  # type: ignore[union-attr]
    room = 5
    prompt = MAX_MODEL_LEN - room - HI_TOKENS + len("hi")
    plane.engine.script(Reply(text="too long"))
    messages: Any = [{"role": "user", "content": "x" * prompt}]
    answer = client.messages.create(model=BASE, max_tokens=20_000, messages=messages)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("model_context_window_exceeded", room)
    assert plane.engine.requests[-1].sampling.max_tokens == room
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages = [{"role": "user", "content": "x" * (prompt + room)}]
        client.messages.create(model=BASE, max_tokens=20_000, messages=messages)


async def test_the_async_client_streams(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="abc"))
    async with (
        anthropic.AsyncAnthropic(base_url=plane.url, api_key="lpx_acme", max_retries=0) as client,
        client.messages.stream(model="pirate", max_tokens=9, messages=HI) as stream,
    ):
        assert "".join([text async for text in stream.text_stream]) == "abc"


def test_counting(plane: DataPlane, client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="pirate", messages=HI, system="Be brief.")
    assert counted.input_tokens == len("<system\nBe brief.>\n") + HI_TOKENS
    assert plane.engine.requests == []
    assert plane.limiter.reserved == {}
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="nobody", messages=HI)


def test_counting_names_fields_as_the_client_has_them(plane: DataPlane) -> None:
    plane.on_loop(lambda: plane.resolver.formats.update(json=("hermes", "none")))
    refused = {"type": "array"}
    tool = {"name": "f", "strict": True, "input_schema": refused}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        _, _, message = raw_error(plane, path, json={"model": "json", "tools": [tool]})
        assert message.startswith("'tools[0].input_schema' cannot be used"), message


def test_a_bearer_is_a_key_too(plane: DataPlane) -> None:
    with anthropic.Anthropic(base_url=plane.url, auth_token="lpx_acme", max_retries=0) as client:
        assert client.messages.create(model=BASE, max_tokens=9, messages=HI).content


def test_a_failure_after_the_first_byte(plane: DataPlane, client: anthropic.Anthropic) -> None:
    plane.engine.default = Reply(text="Hel", error=("server_overloaded", "Too much."))
    told = events_of(plane)
    assert told[-1]["error"] == {"type": "overloaded_error", "message": "Too much."}
    assert told[-1]["request_id"].startswith("req-")
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        client.messages.stream(model=BASE, max_tokens=9, messages=HI) as stream,
    ):
        stream.until_done()
    assert caught.value.type == "overloaded_error"


def raw_error(plane: DataPlane, path: str = "/v1/messages", **options: Any) -> tuple[int, str, str]:
    headers = {"x-api-key": "lpx_acme", **options.pop("headers", {})}
    fields = {"model": BASE, "messages": HI} | ({"max_tokens": 9} if path == "/v1/messages" else {})
    sent = options if "content" in options else {"json": fields | options.pop("json", {})}
    method = options.pop("method", "POST")
    answer = plane.http.request(method, plane.url + path, headers=headers, **sent)
    told = answer.json()
    assert set(told) == {"type", "error", "request_id"}, told
    assert set(told["error"]) == {"type", "message"}
    assert told["request_id"] == answer.headers["request-id"]
    return answer.status_code, told["error"]["type"], told["error"]["message"]


def test_every_refusal_is_anthropics(plane: DataPlane) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert raw_error(plane, path, headers={"x-api-key": "lpx_no"})[:2] == (401, "authentication_error")
        assert raw_error(plane, path, json={"model": "nobody"})[:2] == (404, "not_found_error")
        assert raw_error(plane, path, json={"messages": []})[:2] == (400, "invalid_request_error")
        assert raw_error(plane, path, json={"tools": [{"type": "x"}]})[:2] == (400, "invalid_request_error")
        assert raw_error(plane, path, content=b"{")[:2] == (400, "invalid_request_error")
        assert raw_error(plane, path, method="GET")[:2] == (405, "invalid_request_error")
        status, kind, message = raw_error(plane, path, headers={"anthropic-version": "1999-01-01"})
        assert (status, kind) == (400, "invalid_request_error")
        assert "2023-06-01" in message
    assert raw_error(plane, "/v1/messages/batches")[:2] == (404, "not_found_error")
    assert raw_error(plane, content=b" " * (5 << 20))[:2] == (413, "request_too_large")
    headers = {"content-type": "text/plain"}
    assert raw_error(plane, content=b"{}", headers=headers)[:2] == (415, "invalid_request_error")


def test_the_message_names_the_field(plane: DataPlane) -> None:
    image = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    message = raw_error(plane, json=image)[2]
    assert message.startswith("messages[0].content[0].type: ")


def test_limits_overload_deadline_and_drain(plane: DataPlane) -> None:
    plane.limiter.refuse_with = [RateLimited("Slower.", retry_after_s=3.0)]
    assert raw_error(plane) == (429, "rate_limit_error", "Slower. Please try again in 3s.")
    plane.limiter.refuse_with = [QuotaSpent("Spent.")]
    assert raw_error(plane)[:2] == (429, "rate_limit_error")
    plane.engine.script(Reply(error=("server_overloaded", "Full."), refused=True))
    assert raw_error(plane)[:2] == (529, "overloaded_error")
    plane.engine.script(Reply(error=("engine_restarting", "Died.")))
    assert raw_error(plane)[:2] == (503, "api_error")
    plane.engine.script(Reply(error=("internal_error", "a secret")))
    status, kind, message = raw_error(plane)
    assert (status, kind) == (500, "api_error")
    assert "secret" not in message
    plane.engine.script(Reply(text="x", hold=True))
    assert raw_error(plane, headers={"x-loraplex-timeout-ms": "50"})[:2] == (504, "timeout_error")
    plane.on_loop(lambda: setattr(plane.drain, "phase", DrainPhase.REFUSING))
    try:
        assert raw_error(plane)[:2] == (503, "api_error")
    finally:
        plane.on_loop(lambda: setattr(plane.drain, "phase", DrainPhase.SERVING))
