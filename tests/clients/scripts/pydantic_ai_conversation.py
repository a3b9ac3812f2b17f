"""Tools and typed answers by pydantic-ai, over each of the three wires that it speaks; see conversation.py for the
protocol."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from conversation import KEY, MODEL, URL, ask, check
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the weather in Bonn?"


class Weather(BaseModel):
    city: str
    degrees: int


def models() -> dict[str, Model]:
    ours = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
    theirs = AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
    return {
        "chat": OpenAIChatModel(MODEL, provider=ours),
        "responses": OpenAIResponsesModel(MODEL, provider=ours, settings={"openai_store": False}),
        "messages": AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=theirs)),
    }


def with_a_tool(model: Model) -> str:
    ask("weather_turn")
    agent = Agent(model, instructions="Be brief.", retries=0)

    @agent.tool_plain
    def weather(city: str) -> str:
        """What the weather is like in a city."""
        return f"12 degrees in {city}"

    return agent.run_sync(QUESTION).output


def typed(model: Model, how: Any, reply: str) -> dict[str, Any]:
    ask(reply)
    return Agent(model, output_type=how, retries=0).run_sync(QUESTION).output.model_dump()


for name, model in models().items():
    check(f"{name}_tool", lambda model=model: with_a_tool(model))
    check(
        f"{name}_typed_by_tool",
        lambda model=model: typed(model, ToolOutput(Weather, name="weather"), "weather_full_call"),
    )
    if name != "messages":
        check(f"{name}_typed", lambda model=model: typed(model, NativeOutput(Weather), "weather_json"))
