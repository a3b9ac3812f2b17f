"""Two turns with a call of a tool, by the official clients of both dialects. The scripted model writes its calls as
Hermes does, and thinks between tags; what the model is shown of the first turn is looked at in its prompt."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from support.engine.fake_engine import Reply
from support.http.data_plane import BASE, DataPlane
from support.models.byte_tokenizer import byte_decode

CALL = '<think>Sum.</think>I add.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
TURN = 'Sum.</think>I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": "ü"}}</tool_call>'
"""The model's first turn, as the template writes it in the second."""
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}


def prompt(plane: DataPlane) -> str:
    return byte_decode(plane.engine.requests[-1].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("carried", ["content", "encrypted_content"])
def test_responses(speaking: DataPlane, stream: bool, carried: str) -> None:
    client = speaking.client()
    tools: Any = [
        {"type": "function", "name": "add", "parameters": ADD, "strict": False},
        {"type": "web_search"},
    ]
    speaking.engine.script(Reply(text=CALL, cuts=(3, 1, 7)), Reply(text="It is 3."))
    asked: Any = {"model": BASE, "tools": tools, "include": ["reasoning.encrypted_content"]}
    given: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    answer = respond(client, stream, input=given, **asked)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "Sum."
    assert message.content[0].text == "I add."
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": "ü"})
    assert answer.status == "completed"
    assert [tool.name for tool in answer.tools] == ["add"]
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>Sum.</think")
    # The items go back as they came; of the reasoning one of its two forms is enough.
    back = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
    back[1]["content"] = [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}]
    back[0].pop("content" if carried == "encrypted_content" else "encrypted_content")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "three"}
    answer = respond(client, stream, input=[*given, *back, output], **asked)
    assert answer.output_text == "It is 3."
    shown = prompt(speaking)
    assert TURN in shown
    assert shown.index("1 + 2?") < shown.index(TURN) < shown.index("three")


def respond(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as streamed:
        for _ in streamed:
            pass
        return streamed.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_messages(speaking: DataPlane, stream: bool, display: str) -> None:
    speaking.engine.script(Reply(text=CALL, cuts=(3, 1, 7)), Reply(text="It is 3."))
    with anthropic.Anthropic(base_url=speaking.url, api_key="lpx_acme", max_retries=0) as client:
        asked: Any = {
            "model": BASE,
            "max_tokens": 999,
            "tools": [{"name": "add", "input_schema": ADD}],
            "thinking": {"type": "adaptive", "display": display},
        }
        given: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        answer = message(client, stream, messages=given, **asked)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        thinking, text, use = answer.content
        assert thinking.thinking == ("" if display == "omitted" else "Sum.")
        assert (text.text, use.name, use.input) == ("I add.", "add", {"a": 1, "b": "ü"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens_details.thinking_tokens > 0
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "three"}
        back = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
        for block in back["content"]:
            block.pop("parsed_output", None)  # type: ignore[attr-defined]
        answer = message(
            client, stream, messages=[*given, back, {"role": "user", "content": [result]}], **asked
        )
        assert (answer.content[0].text, answer.stop_reason) == ("It is 3.", "end_turn")
    shown = prompt(speaking)
    assert TURN in shown
    assert shown.index("1 + 2?") < shown.index(TURN) < shown.index("three")


def message(client: anthropic.Anthropic, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as streamed:
        return streamed.get_final_message()


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_parallel_calls(speaking: DataPlane, dialect: str) -> None:
    calls = "".join(
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in range(3)
    )
    speaking.engine.script(Reply(text=calls))
    if dialect == "responses":
        tools: Any = [{"type": "function", "name": "add", "parameters": ADD}]
        answer: Any = speaking.client().responses.create(model=BASE, input="x", tools=tools)
        found = [(item.call_id, json.loads(item.arguments)) for item in answer.output]
    else:
        with anthropic.Anthropic(base_url=speaking.url, api_key="lpx_acme", max_retries=0) as client:
            tools = [{"name": "add", "input_schema": ADD}]
            messages: Any = [{"role": "user", "content": "x"}]
            answer = client.messages.create(model=BASE, max_tokens=999, messages=messages, tools=tools)
        found = [(block.id, block.input) for block in answer.content]
    assert [arguments for _, arguments in found] == [{"a": number} for number in range(3)]
    assert len({call_id for call_id, _ in found}) == 3


def test_tools_without_a_format_name_the_field(speaking: DataPlane) -> None:
    speaking.on_loop(lambda: speaking.resolver.formats.update(pirate=("none", "none")))
    tools: Any = [{"type": "web_search"}, {"type": "function", "name": "add", "parameters": ADD}]
    with pytest.raises(openai.BadRequestError) as caught:
        speaking.client().responses.create(model="pirate", input="x", tools=tools)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_field")
