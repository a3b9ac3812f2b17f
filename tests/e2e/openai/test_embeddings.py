"""`/v1/embeddings` by the official client, through a whole server."""

from __future__ import annotations

import math

import pytest

from support.servers.live_server import Shop

pytestmark = pytest.mark.slow


def embed(shop: Shop, model: str, texts: list[str], **options: object) -> list[list[float]]:
    answer = shop.openai().embeddings.create(model=model, input=texts, extra_body=options)
    assert [item.index for item in answer.data] == list(range(len(texts)))
    return [item.embedding for item in answer.data]


def test_base_and_adapter_embed_together_as_alone(tiny: Shop) -> None:
    texts = ["The sea is wide.", "Owls hunt at night. " * 40, "x"]
    found = {}
    for model in ("tiny", "a"):
        for pooling in ("mean", "last"):
            together = embed(tiny, model, texts, pooling=pooling)
            for text, vector in zip(texts, together, strict=True):
                (alone,) = embed(tiny, model, [text], pooling=pooling)
                assert vector == pytest.approx(alone, abs=1e-5)
                assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
            found[model, pooling] = together[0]
    vectors = list(found.values())
    for index, vector in enumerate(vectors):
        assert all(max(map(abs, map(float.__sub__, vector, other))) > 1e-3 for other in vectors[:index])
    assert tiny.server.stats()["num_running"] == 0


def test_an_embedding_is_counted_and_cached_prefixes_change_nothing(tiny: Shop) -> None:
    client = tiny.openai()
    text = "A prompt of some blocks, again and again. " * 4
    client.completions.create(model="tiny", prompt=text, max_tokens=1)
    first, again = (client.embeddings.create(model="tiny", input=text) for _ in range(2))
    assert first.data[0].embedding == pytest.approx(again.data[0].embedding, abs=1e-6)
    assert first.usage.prompt_tokens == first.usage.total_tokens == again.usage.prompt_tokens > 100
