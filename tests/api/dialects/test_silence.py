"""A stream that has nothing to tell for a while: a call without a grammar is held until it is complete."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from loraplex.api.generation import endpoints
from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.generated_answers import PATHS

ADD = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = 'I add.<tool_call>\n{"name": "add", "arguments": {"a": "one"}}\n</tool_call>'
PINGS = {
    "chat": ": ping\n\n",
    "responses": ": ping\n\n",
    "messages": 'event: ping\ndata: {"type":"ping"}\n\n',
}
TURN: Any = [{"role": "user", "content": "?"}]
FUNCTION: Any = {"name": "add", "parameters": ADD}
BODIES: dict[str, Any] = {
    "chat": {"messages": TURN, "max_tokens": 200, "tools": [{"type": "function", "function": FUNCTION}]},
    "responses": {"input": "?", "max_output_tokens": 200, "tools": [{"type": "function", **FUNCTION}]},
    "messages": {"messages": TURN, "max_tokens": 200, "tools": [{"name": "add", "input_schema": ADD}]},
}


@pytest.fixture
def calling(speaking: DataPlane) -> DataPlane:
    speaking.engine.default = Reply(text=CALL)
    return speaking


def streamed(plane: DataPlane, dialect: str) -> str:
    body = {"model": BASE, "stream": True, **BODIES[dialect]}
    answer = plane.http.post(
        plane.url + PATHS[dialect], json=body, headers={"authorization": "Bearer lpx_acme"}
    )
    assert answer.status_code == 200, answer.text
    return answer.content.decode()


@pytest.mark.parametrize("dialect", list(PINGS))
def test_a_stream_that_is_silent_for_long_pings(
    calling: DataPlane, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ping = PINGS[dialect]
    brief = streamed(calling, dialect).count(ping)
    monkeypatch.setattr(endpoints, "PING_S", 0.0)
    events = streamed(calling, dialect)
    held = CALL.index("</tool_call>") - CALL.index("<tool_call>")
    assert brief <= 1  # Anthropic's streams begin with one
    assert events.count(ping) > held // 2
    assert events.rindex(ping) > events.index('"."')


def test_clients_pass_over_pings(calling: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "PING_S", 0.0)
    client, chat = calling.client(), BODIES["chat"]
    with client.chat.completions.stream(model=BASE, **chat) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"a": "one"}
    with client.responses.stream(model=BASE, **BODIES["responses"]) as responses:
        assert [item.type for item in responses.get_final_response().output] == ["message", "function_call"]
    with (
        anthropic.Anthropic(base_url=calling.url, api_key="lpx_acme", max_retries=0) as messages,
        messages.messages.stream(model=BASE, **BODIES["messages"]) as told,
    ):
        assert told.get_final_message().content[-1].input == {"a": "one"}  # type: ignore[union-attr]
