"""SIGKILL of one of two engines of the real model: answers that have begun go on with the other, and their text is that
of an undisturbed run."""

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
    LiveServer,
    checked,
    wait_gone,
)
from support.servers.live_streams import Streams

pytestmark = pytest.mark.slow

MAX_TOKENS = 48
SAMPLED: dict[str, Any] = {
    "model": "pirate", "prompt": "The sea", "max_tokens": MAX_TOKENS, "temperature": 0.9, "seed": 7, "n": 3,
    "presence_penalty": 0.4, "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


def sample(server: LiveServer, key: str) -> list[Any]:
    with server.client(key) as client:
        choices = checked(client.post("/v1/completions", json=SAMPLED))["choices"]
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in choices]


def has_started(server: LiveServer, times: int) -> bool:
    return len(server.logged("engine_started")) == times


@pytest.mark.parametrize("deaths", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_the_text_is_that_of_an_undisturbed_run(deaths: int, real_model_dir: Path, tmp_path: Path) -> None:
    with LiveServer(
        real_model_dir,
        tmp_path / "data",
        served_model_name=SERVED_NAME,
        replicas=2,
        ray_address="none",
        **SMALL,
    ) as server:
        server.create_tenant("acme")
        for name in EXAMPLES:
            server.upload("acme", name, EXAMPLE_ADAPTERS / name)
        key = server.create_key("acme")
        models = [SERVED_NAME, *EXAMPLES]
        undisturbed = Streams(server, key, models, max_tokens=MAX_TOKENS)
        undisturbed.join()
        expected, expected_sample = [story.text for story in undisturbed.stories], sample(server, key)
        for life in range(1, deaths + 1):
            streams = Streams(server, key, models, max_tokens=MAX_TOKENS)
            with ThreadPoolExecutor(1) as pool:
                sampled = pool.submit(sample, server, key)
                streams.wait_until_all_run()
                wait_gone(server.kill_engine())
                streams.join()
                assert [story.finished for story in streams.stories] == [True] * len(models)
                assert [story.text for story in streams.stories] == expected
                assert sampled.result(120) == expected_sample
            server.wait(partial(has_started, server, 2 + life), timeout=240)
            assert server.engine()["restarts"] == life
        assert server.idle()
