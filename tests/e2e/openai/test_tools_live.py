"""Calls that must be made, by models without any sense: they parse and fit, in the format of each version."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema_rs
import pytest

from support.servers.live_server import (
    ADAPTER_FILES,
    LiveServer,
    write_tiny_adapter,
)

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", 'the "old" town', "Ōsaka"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "parts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
ASKED = 40
FORMATS = {"hermes": "hermes", "llama": "llama3", "mistral": "mistral", "plain": None}


@pytest.fixture(scope="module")
def server(spoken: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    directory = tmp_path_factory.mktemp("tools")
    spoken.create_tenant("tools")
    for seed, (name, tool_format) in enumerate(FORMATS.items()):
        folder = write_tiny_adapter(directory / name, seed=seed)
        files = {part: (part, (folder / part).read_bytes()) for part in ADAPTER_FILES}
        serving = {"serving": json.dumps({"tool_format": tool_format})}
        answer = spoken.admin.post(f"tenants/tools/adapters/{name}/versions", files=files, data=serving)
        assert (answer.status_code, answer.json()["serving"]["tool_format"]) == (201, tool_format)
    return spoken


def check_calls(message: dict[str, Any]) -> int:
    calls = message["tool_calls"]
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        schema: Any = SCHEMA if call["function"]["name"] == "get_weather" else {"maxProperties": 0}
        assert jsonschema_rs.is_valid(schema, arguments), call
    return len(calls)


def test_versions_of_four_formats_call_in_one_batch(server: LiveServer) -> None:
    key = server.create_key("tools")
    with server.client(key) as http:
        cards = {card["id"]: card["tool_format"] for card in http.get("/v1/models").json()["data"]}
        assert {name: cards[name] for name in FORMATS} == {name: f or "json" for name, f in FORMATS.items()}

        def ask(number: int) -> httpx.Response:
            model = [*FORMATS][number % 4]
            body: dict[str, Any] = {
                "model": model,
                "messages": [{"role": "user", "content": f"Go {number}."}],
            }
            body |= {"tools": TOOLS, "tool_choice": "required", "seed": number, "max_tokens": 1500}
            return http.post("/v1/chat/completions", json=body)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(ASKED)))
    finished = 0
    for answer in answers:
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "length":
            continue
        finished += 1
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert 1 <= check_calls(choice["message"]) <= 16
    assert finished > ASKED // 2


def test_named_calls_come_as_a_stream_too(server: LiveServer) -> None:
    body: dict[str, Any] = {
        "model": "hermes",
        "messages": [{"role": "user", "content": "Go."}],
        "tools": TOOLS,
    }
    body |= {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "seed": 1}
    with server.client(server.create_key("tools")) as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        answer = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert whole["finish_reason"] == "stop"
    assert check_calls(whole["message"]) == 1
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    pieces = [
        call["function"]["arguments"]
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert "".join(pieces) == whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert len(pieces) > 3
