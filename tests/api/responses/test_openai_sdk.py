"""The official OpenAI client against /v1/responses over a real socket."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.events import read_events

HI_TOKENS = len("<user\nhi>\n<assistant\n")  # each of the template's marks is one token
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(plane: DataPlane, **fields: Any) -> list[dict[str, Any]]:
    """Of a stream, each as the SDK's own types have it."""
    body = {"model": BASE, "input": "hi", "stream": True, **fields}
    headers = {"authorization": "Bearer lpx_acme"}
    answer = plane.http.post(f"{plane.url}/v1/responses", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = read_events(answer.text)
    assert found[-1] == (None, "[DONE]")
    told = [json.loads(data) for _, data in found[:-1]]
    assert [name for name, _ in found[:-1]] == [event["type"] for event in told]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        EVENT.validate_python(event)
    return told


def test_a_whole_answer(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Hello wörld", adapter_state="warm", cached_tokens=16))
    raw = plane.client().responses.with_raw_response.create(
        model="pirate", input="hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
    )
    answer = raw.parse()
    Response.model_validate_json(raw.text)
    assert (answer.status, answer.model, answer.output_text) == ("completed", "pirate", "Hello wörld")
    assert answer.id.startswith("resp_")
    (item,) = answer.output
    assert item.type == "message"
    assert item.status == "completed"
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    usage = answer.usage
    assert usage is not None
    assert usage.input_tokens == len("<system\nBe brief.>\n") + HI_TOKENS
    assert usage.input_tokens_details.cached_tokens == 16
    assert usage.output_tokens == len("Hello wörld".encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert raw.headers["x-loraplex-adapter"] == "pirate@v2"
    assert plane.ledger.rows[-1].endpoint == "/v1/responses"


def test_a_stream_has_each_event_in_its_place(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Hé", cached_tokens=3))
    told = events_of(plane)
    assert [event["type"] for event in told] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    first, last = told[0]["response"], told[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert last["output"] == [told[-2]["item"]]
    assert last["output"][0]["content"] == [told[-3]["part"]]
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert last["completed_at"] >= last["created_at"]


def test_the_sdk_puts_a_stream_together(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Grüße", chunk=3))
    with plane.client().responses.stream(model=BASE, input="hi") as stream:
        for _ in stream:
            pass
        answer = stream.get_final_response()
    assert (answer.output_text, answer.status) == ("Grüße", "completed")


async def test_the_async_client_streams(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="abc"))
    async with plane.async_client() as client:
        stream = await client.responses.create(model="pirate", input="hi", stream=True)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "abc"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut(plane: DataPlane, stream: bool) -> None:
    plane.engine.script(Reply(text="too long"))
    if stream:
        told = events_of(plane, max_output_tokens=3)
        assert told[-1]["type"] == "response.incomplete"
        answer = Response.model_validate(told[-1]["response"])
    else:
        answer = plane.client().responses.create(model=BASE, input="hi", max_output_tokens=3)
    assert (answer.status, answer.output_text) == ("incomplete", "too")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert answer.max_output_tokens == 3


def test_an_answer_of_no_words_is_a_message(plane: DataPlane) -> None:
    plane.engine.script(Reply(text=""))
    answer = plane.client().responses.create(model=BASE, input="hi")
    assert (answer.status, answer.output_text, len(answer.output)) == ("completed", "", 1)


def test_log_probabilities(plane: DataPlane) -> None:
    include: Any = ["message.output_text.logprobs"]
    plane.engine.default = Reply(text="Héllo", chunk=2)
    whole = plane.client().responses.create(model=BASE, input="hi", include=include, top_logprobs=2)
    part = whole.output[0].content[0]  # type: ignore[union-attr, index]
    assert part.logprobs is not None  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == "Héllo"  # type: ignore[union-attr]
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}  # type: ignore[union-attr]
    told = events_of(plane, include=include, top_logprobs=2)
    streamed = [
        entry
        for event in told
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert streamed == told[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in streamed] == [entry.token for entry in part.logprobs]  # type: ignore[union-attr]
    plain = plane.client().responses.create(model=BASE, input="hi")
    assert plain.output[0].content[0].logprobs == []  # type: ignore[union-attr, index]


def test_a_failure_after_the_first_byte(plane: DataPlane) -> None:
    plane.engine.script(Reply(text="Hel", error=("engine_restarting", "The engine died.")))
    told = events_of(plane)
    error, failed = told[-2:]
    assert (error["type"], error["code"], error["message"]) == (
        "error",
        "engine_restarting",
        "The engine died.",
    )
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine died."}


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("grammar_failed", "invalid_prompt"),  # asked again, it fails again
        ("server_overloaded", "server_error"),
    ],
)
def test_a_failure_says_whether_to_ask_again(plane: DataPlane, code: Any, told: str) -> None:
    plane.engine.script(Reply(text="Hel", error=(code, "No.")))
    *_, failed = plane.client().responses.create(model=BASE, input="x", stream=True)
    assert failed.type == "response.failed"
    assert failed.response.error is not None
    assert failed.response.error.code == told


def test_a_failure_before_it_is_an_http_status(plane: DataPlane) -> None:
    plane.engine.script(Reply(error=("adapter_unavailable", "no room")))
    with pytest.raises(openai.InternalServerError) as caught:
        plane.client().responses.create(model="pirate", input="hi", stream=True)
    assert (caught.value.status_code, caught.value.code) == (503, "adapter_unavailable")


def test_refusals_are_openais(plane: DataPlane) -> None:
    client = plane.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="hi", store=True)
    assert (caught.value.param, caught.value.code) == ("store", "unsupported_field")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="x" * 5000)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=BASE, input="hi", max_output_tokens=5000)
    assert (caught.value.param, caught.value.code) == ("max_output_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input="hi")
    with pytest.raises(openai.AuthenticationError):
        plane.client("lpx_wrong").responses.create(model=BASE, input="hi")
