"""The official OpenAI client against the whole product: the base and trained adapters on the real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from support.servers.live_server import EXAMPLES, SERVED_NAME, Shop, write_real_adapter

pytestmark = pytest.mark.slow

QUESTION = "What do you think of the sea?"
GLAD = "I love this phone. It was wonderful and worked perfectly."
SAD = "I hate my hotel room. It was awful and broke at once."
MODELS = (SERVED_NAME, *EXAMPLES)


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(shop: Shop, model: str, text: str = QUESTION, **options: Any) -> str:
    options = {"max_tokens": 48, "temperature": 0, **options}
    answer = shop.openai().chat.completions.create(model=model, messages=messages(text), **options)
    return answer.choices[0].message.content or ""


async def ask_many(shop: Shop, requests: Sequence[dict[str, Any]]) -> list[str]:
    """All at once; the texts, in order. Every second one is streamed."""
    async with openai.AsyncOpenAI(
        base_url=f"{shop.server.data_url}/v1", api_key=shop.key, max_retries=0, timeout=240
    ) as client:

        async def one(number: int, request: dict[str, Any]) -> str:
            if number % 2:
                text = ""
                async for chunk in await client.chat.completions.create(**request, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text
            answer = await client.chat.completions.create(**request)
            return str(answer.choices[0].message.content)

        return await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))


def test_each_model_answers_as_it_was_trained(real: Shop) -> None:
    answers = {model: ask(real, model) for model in MODELS}
    assert len(set(answers.values())) == len(MODELS), answers
    assert set(json.loads(answers["json"])) == {"topic", "answer"}
    assert "\n" not in answers["json"].strip()
    assert answers["pirate"].startswith("Arr")
    assert "th'" in answers["pirate"]
    assert ask(real, "sentiment", GLAD).strip() == "positive"
    assert ask(real, "sentiment", SAD).strip() == "negative"
    base = answers[SERVED_NAME]
    assert len(base.split()) > 10
    assert "sea" in base
    assert "Arr" not in base
    assert "{" not in base


async def test_a_mixed_batch_answers_as_each_alone(real: Shop) -> None:
    """Greedy and seeded sampling, whole and streamed, 16 at once."""
    sampled = {"temperature": 1.0, "top_p": 0.95, "extra_body": {"top_k": 40}}
    requests = [
        {"model": model, "messages": messages(text), "max_tokens": 16, **how}
        for model in MODELS
        for text, how in (
            (QUESTION, {"temperature": 0}),
            (GLAD, {"temperature": 0}),
            (QUESTION, {"seed": 7, **sampled}),
            ("Tell me about owls.", {"seed": 8, **sampled}),
        )
    ]
    together = await ask_many(real, requests)
    alone = [(await ask_many(real, [request]))[0] for request in requests]
    assert together == alone
    reversed_order = await ask_many(real, requests[::-1])
    assert reversed_order[::-1] == alone
    assert len(set(together)) > len(MODELS) * 2
    # The seed decides, and nothing else does.
    again = await ask_many(real, [{**requests[2], "seed": 7}, {**requests[2], "seed": 9}])
    assert again[0] == alone[2] != again[1]


def test_usage_counts_what_the_tokenizer_counts(real: Shop, real_model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))
    prompt = "The capital of France is"
    answer = real.openai().completions.create(model=SERVED_NAME, prompt=prompt, max_tokens=5, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(tokenizer.encode(prompt).ids)
    assert usage.completion_tokens == 5 == len(tokenizer.encode(answer.choices[0].text).ids)
    assert usage.total_tokens == usage.prompt_tokens + 5


def test_every_spelling_of_a_version(real: Shop) -> None:
    client = real.openai()
    cards = {card.id: card for card in client.models.list()}
    assert set(cards) == set(MODELS)
    digest = str(cards["pirate"].model_dump()["root"]).removeprefix("sha256:")
    assert cards["pirate"].model_dump()["parent"] == SERVED_NAME
    answers = set()
    for spelling in (
        "pirate",
        "pirate@v1",
        f"pirate@sha256:{digest}",
        f"pirate@sha256:{digest[:12]}",
        f"{SERVED_NAME}:pirate",
        f"{SERVED_NAME}:pirate@v1",
    ):
        raw = client.chat.completions.with_raw_response.create(
            model=spelling, messages=messages(QUESTION), max_tokens=8, temperature=0
        )
        assert raw.headers["x-loraplex-adapter"] == "pirate@v1", spelling
        answers.add(raw.parse().choices[0].message.content)
    assert len(answers) == 1
    for wrong in ("pirate@v2", "pirate@", f"pirate@sha256:{digest[:11]}", "pirate@sha256:" + "0" * 12):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=wrong, messages=messages(QUESTION))
        assert caught.value.code == "model_not_found"


def test_an_adapter_is_hot_before_its_first_request(real: Shop, tmp_path: Path) -> None:
    real.server.upload("acme", "newcomer", write_real_adapter(tmp_path / "newcomer", seed=401))
    everywhere = ["device", "host", "disk"]
    real.server.wait(lambda: real.server.residency().get("newcomer@v1") == everywhere)
    client = real.openai()
    raw = client.completions.with_raw_response.create(model="newcomer", prompt="a", max_tokens=2)
    assert raw.headers["x-loraplex-adapter-state"] == "hot"
    base = client.completions.with_raw_response.create(model=SERVED_NAME, prompt="a", max_tokens=2)
    assert "x-loraplex-adapter" not in base.headers
    assert "x-loraplex-adapter-state" not in base.headers
    assert real.server.admin.delete("tenants/acme/adapters/newcomer").status_code == 204


def test_admin_reports_engine_info_and_stats(real: Shop) -> None:
    ask(real, "pirate", max_tokens=2)
    engine = real.server.engine()
    assert engine["healthy"] is True
    assert engine["restarts"] == 0
    assert engine["info"]["model_name"] == SERVED_NAME
    assert engine["info"]["kv_bytes"] <= 512 << 20
    assert engine["stats"]["num_steps"] > 0
    real.server.wait(real.server.idle)
