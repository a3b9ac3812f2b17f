"""Typed answers by instructor, in each of its ways to ask for them; see conversation.py for the protocol."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from conversation import KEY, MODEL, URL, ask, check
from pydantic import BaseModel

QUESTION = "What is the weather in Bonn?"


class Weather(BaseModel):
    city: str
    degrees: int


def typed(mode: instructor.Mode, reply: str, *, partial: bool = False) -> dict[str, Any]:
    ask(reply)
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
    options: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "response_model": Weather,
        "max_retries": 0,
    }
    if not partial:
        return dict(client.create(**options).model_dump())
    *_, last = client.create_partial(**options)
    return dict(last.model_dump())


check("tools", lambda: typed(instructor.Mode.TOOLS, "weather_call_of_its_class"))
check(
    "tools_streamed", lambda: typed(instructor.Mode.TOOLS, "weather_call_of_its_partial_class", partial=True)
)
check("json_schema", lambda: typed(instructor.Mode.JSON_SCHEMA, "weather_json"))
check("json", lambda: typed(instructor.Mode.JSON, "weather_json"))
