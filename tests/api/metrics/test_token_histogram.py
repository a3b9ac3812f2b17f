"""The histogram of the time between tokens is told as prometheus_client would tell it."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from loraplex.api.metrics.api_metrics import TOKEN_S
from loraplex.api.metrics.token_histogram import TokenHistogram


def test_the_text_is_that_of_prometheus_client_for_the_same_observations() -> None:
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    theirs_one = Histogram("vllm:x_seconds", "Between two.", ["model_name"], buckets=TOKEN_S, registry=theirs)
    histogram = TokenHistogram("vllm:x_seconds", "Between two.", {"model_name": 'a"b'}, TOKEN_S)
    ours.register(histogram)
    drawn = random.Random(1)
    values = [*TOKEN_S, 0.0, 1e9, *(drawn.expovariate(20) for _ in range(1000))]

    def text(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if not line.startswith("vllm:x_seconds_created{")]

    for number, value in enumerate([*values, None]):
        if number in (0, 1, len(TOKEN_S), len(values)):
            theirs_one.labels('a"b')
            assert text(ours) == text(theirs)
        if value is not None:
            theirs_one.labels('a"b').observe(value)
            histogram.observe(value)


def test_it_says_when_it_began() -> None:
    registry = CollectorRegistry()
    registry.register(TokenHistogram("vllm:x_seconds", "Between two.", {"model_name": "m"}, TOKEN_S))
    created = registry.get_sample_value("vllm:x_seconds_created", {"model_name": "m"})
    assert created is not None
    assert created > 1_700_000_000
