"""SIGKILL of one of two engines: answers that have begun go on with the other, and their text is that of an undisturbed
run. Of a tiny model; the long version has the real one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.servers.live_server import (
    EXAMPLE_ADAPTERS,
    EXAMPLES,
    SERVED_NAME,
    SMALL,
    TINY_SIZES,
    LiveServer,
    checked,
    wait_gone,
    write_tiny_adapter,
)
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

SAMPLED: dict[str, Any] = {
    "model": "pirate", "prompt": "The sea", "temperature": 0.9, "seed": 7, "n": 3, "presence_penalty": 0.4,
    "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


def sample(server: LiveServer, key: str, max_tokens: int) -> list[Any]:
    with server.client(key) as client:
        body = SAMPLED | {"max_tokens": max_tokens}
        choices = checked(client.post("/v1/completions", json=body))["choices"]
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def has_started(server: LiveServer, times: int) -> bool:
    return len(server.logged("engine_started")) == times


@pytest.mark.parametrize(
    ("model", "deaths", "tokens"), [("tiny", 1, 600), pytest.param("real", 4, 48, marks=pytest.mark.soak)]
)
def test_the_text_is_that_of_an_undisturbed_run(
    model: str, deaths: int, tokens: int, tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folders = {name: EXAMPLE_ADAPTERS / name for name in EXAMPLES}
    if model == "tiny":
        folders = {name: write_tiny_adapter(tmp_path / name, seed=n) for n, name in enumerate(EXAMPLES)}
    with LiveServer(
        tiny_model if model == "tiny" else request.getfixturevalue("real_model_dir"),
        tmp_path / "data",
        served_model_name=SERVED_NAME,
        replicas=2,
        ray_address="none",
        **(TINY_SIZES | {"dtype": "float32"} if model == "tiny" else SMALL),
    ) as server:
        server.create_tenant("acme")
        for name, folder in folders.items():
            server.upload("acme", name, folder)
        key = server.create_key("acme")
        models = [SERVED_NAME, *EXAMPLES]
        undisturbed = Streams(server, key, models, max_tokens=tokens)
        undisturbed.join()
        expected, expected_sample = [story.text for story in undisturbed.stories], sample(server, key, tokens)
        for life in range(1, deaths + 1):
            streams = Streams(server, key, models, max_tokens=tokens)
            with ThreadPoolExecutor(1) as pool:
                sampled = pool.submit(sample, server, key, tokens)
                streams.wait_until_all_run()
                wait_gone(server.kill_engine())
                streams.join()
                assert [story.finished for story in streams.stories] == [True] * len(models)
                assert [story.text for story in streams.stories] == expected
                assert sampled.result(120) == expected_sample
            server.wait(partial(has_started, server, 2 + life), timeout=240)
            assert server.engine()["restarts"] == life
        assert server.idle()
