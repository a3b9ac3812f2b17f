"""Tools for base models whose chat template knows none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine.fake_engine import Reply
from support.http.admin_plane import ADMIN_TOKEN, SERVED_NAME, adapter_files
from support.http.whole_server import WholeServer, bearer, whole_server
from support.models.byte_tokenizer import byte_decode
from support.models.matching import takes

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Lima", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
USER = {"role": "user", "content": "How is the weather?"}


def ask(server: WholeServer, key: dict[str, str], reply: str, **fields: Any) -> httpx.Response:
    server.plane.engine.script(Reply(text=reply))
    body = {"model": SERVED_NAME, "messages": [USER], "tools": [TOOL]} | fields
    return server.http.post(f"{server.data_url}/v1/chat/completions", json=body, headers=key)


def choice(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    chosen: dict[str, Any] = answer.json()["choices"][0]
    return chosen


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with whole_server(tmp_path_factory.mktemp("generic")) as running:
        running.plane.make_tenant()
        yield running


@pytest.fixture(scope="module")
def key(server: WholeServer) -> dict[str, str]:
    return bearer(server.plane.make_key("acme", "inference"))


def test_the_model_is_told_of_tools_and_how_to_call_them(server: WholeServer, key: dict[str, str]) -> None:
    ask(server, key, "words")
    prompt = byte_decode(server.plane.engine.requests[-1].prompt_ids)
    assert prompt.startswith("system\nYou can call tools.")
    assert json.dumps(TOOL) in prompt
    assert '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}' in prompt
    cards = server.http.get(f"{server.data_url}/v1/models", headers=key).json()["data"]
    assert cards[0]["tool_format"] == "json"


def test_words_stay_words_and_a_call_becomes_one(server: WholeServer, key: dict[str, str]) -> None:
    words = choice(ask(server, key, "It is {sunny}."))
    assert (words["message"]["content"], words["finish_reason"]) == ("It is {sunny}.", "stop")
    assert not words["message"].get("tool_calls")
    called = choice(ask(server, key, CALL))
    assert called["finish_reason"] == "tool_calls"
    assert called["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    two = choice(ask(server, key, f"[{CALL}, {CALL}]"))
    assert len(two["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("named", [False, True])
def test_a_forced_call_follows_its_schema(server: WholeServer, key: dict[str, str], named: bool) -> None:
    by_name = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(server, key, CALL, tool_choice=by_name if named else "required", parallel_tool_calls=False)
    assert choice(answer)["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    grammar = server.plane.engine.requests[-1].grammar
    assert grammar is not None
    assert takes(grammar, CALL)
    assert not takes(grammar, CALL.replace("Paris", "Rome"))
    assert not takes(grammar, f"[{CALL}, {CALL}]")
    assert not takes(grammar, "It is sunny.")


def test_a_stream_has_the_call_in_pieces(server: WholeServer, key: dict[str, str]) -> None:
    answer = ask(server, key, CALL, stream=True)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls[0]["function"]["name"] == "get_weather"
    assert "".join(call["function"].get("arguments") or "" for call in calls) == '{"city": "Paris"}'
    assert not any(delta.get("content") for delta in deltas)


def test_results_go_back_through_a_template_without_their_role(
    server: WholeServer, key: dict[str, str]
) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Lima"}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "fog"},
        {"role": "user", "content": "And?"},
    ]
    assert choice(ask(server, key, "Foggy.", messages=messages))["message"]["content"] == "Foggy."
    prompt = byte_decode(server.plane.engine.requests[-1].prompt_ids)
    assert 'assistant\n{"name": "get_weather", "arguments": {"city": "Lima"}}\n' in prompt
    assert "fog" in prompt
    assert prompt.endswith("And?\nassistant\n")


def test_none_still_refuses_and_says_what_a_tenant_can_do(tmp_path: Path) -> None:
    files = adapter_files(tmp_path / "adapter")
    with whole_server(tmp_path, tool_format="none") as server:
        server.plane.make_tenant()
        key = bearer(server.plane.make_key("acme", "inference"))
        refused = ask(server, key, CALL)
        assert refused.status_code == 400
        assert "loraplex adapter push NAME DIR --tool-format json" in refused.json()["error"]["message"]
        assert ask(server, key, "words", tool_choice="none").status_code == 200
        path = f"{server.admin_url}/admin/v1/tenants/acme/adapters/caller/versions"
        serving = {"serving": json.dumps({"tool_format": "json"})}
        server.http.post(path, files=files, data=serving, headers=bearer(ADMIN_TOKEN)).raise_for_status()
        server.plane.engine.forget_script()
        called = choice(ask(server, key, CALL, model="caller"))
        assert called["finish_reason"] == "tool_calls"
