"""What Codex and Claude Code sent in two turns with a call of a tool, with their texts cut: both turns are answered.
test_command_lines.py runs the clients themselves, where they are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.http.events import read_events
from support.http.tool_plane import tool_plane
from support.models.byte_tokenizer import byte_decode

CAPTURED = Path(__file__).parent / "captured"


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    with tool_plane(tmp_path_factory.mktemp("model")) as running:
        yield running
        running.settle_all()


def events(plane: DataPlane, captured: dict[str, Any], body: dict[str, Any]) -> list[dict[str, Any]]:
    headers = captured["headers"] | {"authorization": "Bearer lpx_acme"}
    answer = plane.http.post(
        plane.url + captured["path"], json=body | {"model": BASE, "tools": captured["tools"]}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return [json.loads(data) for name, data in read_events(answer.text) if name is not None]


def test_codex(speaking: DataPlane) -> None:
    captured = json.loads((CAPTURED / "codex.json").read_text("utf-8"))
    first, second = captured["turns"]
    call = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo hi"}}\n</tool_call>'
    speaking.engine.script(Reply(text=call), Reply(text="All done"))
    (item,) = events(speaking, captured, first)[-1]["response"]["output"]
    assert (item["type"], item["name"], item["arguments"]) == (
        "function_call",
        "exec_command",
        '{"cmd": "echo hi"}',
    )
    end = events(speaking, captured, second)[-1]
    assert end["type"] == "response.completed"
    assert end["response"]["output"][0]["content"][0]["text"] == "All done"
    # What is no function is not offered, and the answer says so.
    offered = {tool["name"] for tool in end["response"]["tools"]}
    given = {tool.get("name") for tool in captured["tools"] if tool["type"] == "function"}
    assert offered == given
    assert len(offered) < len(captured["tools"])
    shown = byte_decode(speaking.engine.requests[-1].prompt_ids)
    assert "echo hi" in shown
    assert "web_search" not in shown


@pytest.mark.parametrize("older", [False, True])
def test_claude_code(speaking: DataPlane, older: bool) -> None:
    captured = json.loads((CAPTURED / "claude_code.json").read_text("utf-8"))
    first, second = (turn | (captured["older_model"] if older else {}) for turn in captured["turns"])
    use = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hi"}}\n</tool_call>'
    speaking.engine.script(Reply(text="<think>Hm.</think>" + use), Reply(text="All done"))
    told = events(speaking, captured, first)
    starts = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "tool_use"]
    assert starts[1]["name"] == "Bash"
    # It asks for thinking without its text.
    deltas = [event["delta"]["type"] for event in told if event["type"] == "content_block_delta"]
    assert "thinking_delta" not in deltas
    assert "signature_delta" in deltas
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert told[-2]["context_management"] == {"applied_edits": []}
    told = events(speaking, captured, second)
    text = "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta")
    assert (text, told[-2]["delta"]["stop_reason"]) == ("All done", "end_turn")
    shown = byte_decode(speaking.engine.requests[-1].prompt_ids)
    assert "DeferredToolPlaceholder" not in shown
