"""Answers in a form, from the real model: valid whatever it would say, beside free answers and on each adapter."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from support.servers.live_server import SERVED_NAME, Shop

pytestmark = pytest.mark.slow

MODELS = (SERVED_NAME, "pirate")
SHIP = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "masts": {"type": "integer", "minimum": 1, "maximum": 5},
        "kind": {"enum": ["sloop", "brig"]},
        "crew": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}, "maxItems": 2},
    },
    "required": ["name", "masts", "kind", "crew"],
    "additionalProperties": False,
}
AS_SHIP = {"response_format": {"type": "json_schema", "json_schema": {"name": "ship", "schema": SHIP}}}


async def ask(
    client: openai.AsyncOpenAI, model: str, seed: int, fields: dict[str, Any]
) -> list[tuple[str, str]]:
    """Text and end of each choice; every second one is streamed."""
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Tell of a ship."}]}
    asked |= {"temperature": 1, "seed": seed, "max_tokens": 160, "n": 2, "extra_body": fields}
    if seed % 2:
        texts, ends = ["", ""], ["", ""]
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] = choice.finish_reason or ends[choice.index]
        return list(zip(texts, ends, strict=True))
    answer = await client.chat.completions.create(**asked)
    return [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]


def test_forms_are_kept_in_a_mixed_batch_of_base_and_adapters(real: Shop) -> None:
    kinds: list[tuple[dict[str, Any], Any]] = [
        (AS_SHIP, lambda text: Draft202012Validator(SHIP).is_valid(json.loads(text))),
        (
            {"structured_outputs": {"regex": r"[A-Z][a-z]{2,10} \d{4}"}},
            re.compile(r"[A-Z][a-z]{2,10} \d{4}").fullmatch,
        ),
        ({"structured_outputs": {"choice": ["port", "starboard"]}}, ["port", "starboard"].__contains__),
        (
            {"structured_outputs": {"grammar": 'root ::= ("aye" " "?)+ "!"'}},
            re.compile("(aye ?)+!").fullmatch,
        ),
        ({}, lambda text: True),
    ]

    async def all_of_them() -> list[list[tuple[str, str]]]:
        url = f"{real.server.data_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=real.key, max_retries=0, timeout=240) as client:
            return await asyncio.gather(
                *(
                    ask(client, model, number, fields)
                    for number, (model, (fields, _)) in enumerate((m, kind) for m in MODELS for kind in kinds)
                )
            )

    answers = asyncio.run(all_of_them())
    finished = 0
    for number, choices in enumerate(answers):
        fields, fits = kinds[number % len(kinds)]
        for text, end in choices:
            if fields and end == "stop":
                assert fits(text), (fields, text)
                finished += 1
    assert finished > 12, "of 16 with a form nearly all are short"


def test_answer_with_a_form_is_the_same_again(real: Shop) -> None:
    client = real.openai()

    def once() -> str:
        answer = client.chat.completions.create(
            model="json",
            messages=[{"role": "user", "content": "A ship?"}],
            seed=7,
            max_tokens=120,
            extra_body=AS_SHIP,
        )
        return answer.choices[0].message.content or ""

    assert once() == once()


def test_refusal_names_keyword_and_place(real: Shop) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="the keyword 'uniqueItems' is not supported") as caught:
        real.openai().chat.completions.create(
            model=SERVED_NAME,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"response_format": asked},
        )
    assert caught.value.param == "response_format.json_schema.schema.uniqueItems"
