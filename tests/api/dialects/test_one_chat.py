"""One conversation is one prompt and one way to sample, whichever dialect it comes in."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.models.byte_tokenizer import byte_decode

CUT = '{"text": "half a sent'
PARTS = ["The harbour is closed.", "When does it open?"]
STRING = '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>'
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}


def texts(kind: str, parts: list[str]) -> list[dict[str, str]]:
    return [{"type": kind, "text": part} for part in parts]


CHAT = [
    {"role": "user", "content": texts("text", PARTS)},
    {
        "role": "assistant",
        "content": texts("text", ["I ", "ask."]),
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "note", "arguments": CUT}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": texts("text", PARTS)},
    {"role": "user", "content": "And?"},
]
RESPONSES = [
    {"role": "user", "content": texts("input_text", PARTS)},
    {"role": "assistant", "content": texts("output_text", ["I ", "ask."])},
    {"type": "function_call", "call_id": "c", "name": "note", "arguments": CUT},
    {"type": "function_call_output", "call_id": "c", "output": texts("input_text", PARTS)},
    {"role": "user", "content": "And?"},
]
MESSAGES = [
    {"role": "user", "content": texts("text", PARTS)},
    {
        "role": "assistant",
        "content": [
            *texts("text", ["I ", "ask."]),
            {"type": "tool_use", "id": "c", "name": "note", "input": CUT},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": texts("text", PARTS)}],
    },
    {"role": "user", "content": "And?"},
]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": RESPONSES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/completions": {"prompt": "And?"},
}


def ask(plane: DataPlane, path: str, **fields: Any) -> Any:
    body = {"model": BASE, **ASKED[path], **fields}
    answer = plane.http.post(plane.url + path, json=body, headers={"authorization": "Bearer lpx_acme"})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text_parts_and_a_call_that_was_cut(speaking: DataPlane) -> None:
    """Parts stand on lines of their own; those of the model are joined as it wrote them."""
    prompts = []
    for path in [*ASKED][:3]:
        ask(speaking, path)
        prompts.append(byte_decode(speaking.engine.requests[-1].prompt_ids))
    assert prompts[0] == prompts[1] == prompts[2]
    for told in ("user\n" + "\n".join(PARTS), "I ask.", CUT, "tool\n" + "\n".join(PARTS), "user\nAnd?"):
        assert told in prompts[0]


@pytest.mark.parametrize("path", ASKED)
def test_top_p_of_zero_is_greedy(plane: DataPlane, path: str) -> None:
    for top_p, temperature in ((0, 0.0), (0.0, 0.0), (0.5, 1.0)):
        ask(plane, path, top_p=top_p, temperature=1)
        sampling = plane.engine.requests[-1].sampling
        assert (sampling.temperature, sampling.top_p) == (temperature, top_p or 1.0)


def test_a_call_with_its_arguments_in_a_string(speaking: DataPlane) -> None:
    speaking.engine.default = Reply(text=STRING, cuts=(3, 1, 7))
    function = {"name": "add", "parameters": ADD}
    hi = {"role": "user", "content": "hi"}
    chat = ask(
        speaking, "/v1/chat/completions", messages=[hi], tools=[{"type": "function", "function": function}]
    )
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    responses = ask(speaking, "/v1/responses", input="hi", tools=[{"type": "function", **function}])
    assert [item["arguments"] for item in responses["output"]] == ['{"a": 1}']
    tools = [{"name": "add", "input_schema": ADD}]
    messages = ask(speaking, "/v1/messages", messages=[hi], tools=tools, max_tokens=200)
    assert [block["input"] for block in messages["content"]] == [{"a": 1}]
