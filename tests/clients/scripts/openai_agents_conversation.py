"""Tools, answers in JSON and the newer wires, by the openai and anthropic packages and openai-agents; see
conversation.py for the protocol."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
from agents import Agent, Model, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from conversation import KEY, MODEL, URL, ask, check, refused
from pydantic import BaseModel

QUESTION = "What is the weather in Bonn?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
MESSAGES_TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}


class Weather(BaseModel):
    city: str
    degrees: int


client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
set_tracing_disabled(True)


def user(text: str = QUESTION) -> list[Any]:
    return [{"role": "user", "content": text}]


def calls_of(message: Any) -> list[list[Any]]:
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or ()]


# Chat.


def chat_parse() -> Any:
    ask("weather_json")
    answer = client.chat.completions.parse(model=MODEL, messages=user(), response_format=Weather)
    parsed = answer.choices[0].message.parsed
    return parsed and parsed.model_dump()


def chat_tools(**options: Any) -> dict[str, Any]:
    """A call, its result, and what is said of it."""
    ask("weather_turn")
    asked = user()
    first = client.chat.completions.create(model=MODEL, messages=asked, tools=[CHAT_TOOL], **options)
    (choice,) = first.choices
    calls = choice.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12 degrees"} for call in calls]
    history = [*asked, choice.message.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(model=MODEL, messages=history, tools=[CHAT_TOOL])
    return {
        "finish": choice.finish_reason,
        "text": choice.message.content,
        "calls": calls_of(choice.message),
        "said": second.choices[0].message.content,
    }


def chat_stream() -> dict[str, Any]:
    """By the client's own helper, which builds the whole from the pieces."""
    ask("weather_call")
    with client.chat.completions.stream(model=MODEL, messages=user(), tools=[CHAT_TOOL]) as stream:
        pieces = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        choice = stream.get_final_completion().choices[0]
    return {
        "finish": choice.finish_reason,
        "calls": calls_of(choice.message),
        "streamed": json.loads("".join(pieces)),
    }


# Responses.


def response(**options: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": QUESTION, "store": False, **options})


def told(answer: Any) -> dict[str, Any]:
    return {
        "status": answer.status,
        "text": answer.output_text,
        "calls": [
            [item.name, json.loads(item.arguments)] for item in answer.output if item.type == "function_call"
        ],
    }


def responses_stream() -> dict[str, Any]:
    ask("say")
    text, kinds = "", []
    for event in response(stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    return {"text": text, "first": kinds[0], "last": kinds[-1]}


def responses_tools() -> dict[str, Any]:
    ask("weather_turn")
    first = response(tools=[RESPONSES_TOOL])
    history: list[Any] = [*user(), *(item.model_dump(exclude_none=True) for item in first.output)]
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "12 degrees"}
        for item in first.output
        if item.type == "function_call"
    ]
    return {"first": told(first), "second": told(response(input=history, tools=[RESPONSES_TOOL]))}


def responses_parse() -> Any:
    ask("weather_json")
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, store=False)
    return answer.output_parsed and answer.output_parsed.model_dump()


# Messages.


def blocks(message: Any) -> list[Any]:
    return [
        block.text if block.type == "text" else [block.name, block.input]
        for block in message.content
        if block.type in ("text", "tool_use")
    ]


def messages_tools(streamed: bool) -> dict[str, Any]:
    ask("weather_turn")

    def create(messages: list[Any]) -> Any:
        options: Any = {"model": MODEL, "max_tokens": 256, "messages": messages, "tools": [MESSAGES_TOOL]}
        if not streamed:
            return claude.messages.create(**options)
        with claude.messages.stream(**options) as stream:
            return stream.get_final_message()

    first = create(user())
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "12 degrees"}
        for block in first.content
        if block.type == "tool_use"
    ]
    turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    second = create([*user(), turn, {"role": "user", "content": results}])
    return {
        "stop": [first.stop_reason, second.stop_reason],
        "blocks": [blocks(first), blocks(second)],
    }


def count() -> int:
    return claude.messages.count_tokens(model=MODEL, messages=user()).input_tokens


# openai-agents.


@function_tool
def weather(city: str) -> str:
    """What the weather is like in a city."""
    return f"12 degrees in {city}"


def agent(model: type[Model], **options: Any) -> Any:
    """What an agent said last."""
    there = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    acting = Agent(
        name="forecaster",
        instructions="Be brief.",
        model=model(MODEL, there),
        model_settings=ModelSettings(temperature=0),
        **options,
    )
    output = Runner.run_sync(acting, QUESTION).final_output
    return output.model_dump() if isinstance(output, BaseModel) else output


for name, value in {
    "chat_parse": chat_parse,
    "chat_tools": chat_tools,
    "chat_tools_required": lambda: chat_tools(tool_choice="required"),
    "chat_tools_named": lambda: chat_tools(tool_choice={"type": "function", "function": {"name": "weather"}}),
    "chat_stream": chat_stream,
    "responses": lambda: (ask("say"), told(response()))[1],
    "responses_stream": responses_stream,
    "responses_tools": responses_tools,
    "responses_parse": responses_parse,
    "responses_store": lambda: refused(lambda: response(store=True)),
    "responses_previous": lambda: refused(lambda: response(previous_response_id="resp_1")),
    "messages": lambda: messages_tools(streamed=False),
    "messages_stream": lambda: messages_tools(streamed=True),
    "messages_count": count,
}.items():
    check(name, value)
for name, model in {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}.items():
    check(f"agent_{name}", lambda model=model: (ask("weather_turn"), agent(model, tools=[weather]))[1])
    check(
        f"agent_{name}_typed", lambda model=model: (ask("weather_json"), agent(model, output_type=Weather))[1]
    )
