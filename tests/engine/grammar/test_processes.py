"""Grammars through the public clients: an engine process that is killed and comes back, and one in a thread."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from loraplex.engine.build import build_engine
from loraplex.engine.config import EngineConfig
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.supervision.engine_supervisor import Supervision
from support.cluster.inprocess import InProcessEngineClient
from support.engine.grammars import CASES, regex_case, save_byte_model, text_of

pytestmark = pytest.mark.slow

LONG = regex_case("[a-z]{390}")
WAIT_S = 120


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("engine")
    model_dir = save_byte_model(folder / "model")
    return EngineConfig(
        str(model_dir),
        str(folder / "artifacts"),
        device="cpu",
        kernels="torch",
        max_model_len=400,
        max_num_seqs=8,
        kv_cache_memory=8 << 20,
        adapter_memory=4 << 20,
        adapter_cpu_memory=4 << 20,
        num_threads=1,
    )


def ask(name: str, grammar: str | None, **sampling: int) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 60, "seed": 3, **sampling})
    return EngineRequest(name, "acme", (65, 66), params, grammar=grammar)


async def read(stream: RequestStream) -> tuple[list[int], TokenEvent]:
    events = [event async for event in stream]
    return [token for event in events for token in event.token_ids], events[-1]


async def serve_all(client: Engines, label: str) -> None:
    """A batch of every kind of grammar, and of requests without."""
    requests = [ask(f"{label} {n}", case.grammar, choice=n) for n, case in enumerate(CASES)]
    requests += [ask(f"{label} free {n}", None, max_tokens=9) for n in range(3)]
    answers = await asyncio.gather(*map(read, client.submit(*requests)))
    for case, (tokens, end) in zip(CASES, answers, strict=False):
        assert end.error is None
        if end.finish_reason == "stop":
            assert case.matches(text_of(tokens)), case.name
    assert sum(end.finish_reason == "stop" for _, end in answers) >= len(CASES) - 2
    assert all(len(tokens) == 9 or end.finish_reason == "stop" for tokens, end in answers[len(CASES) :])
    (refused,) = client.submit(ask(f"{label} refused", "start: nosuch"))
    _, end = await read(refused)
    assert end.error is not None
    assert end.error.code == "grammar_failed"


async def test_in_a_thread(config: EngineConfig) -> None:
    client = InProcessEngineClient(lambda wake: build_engine(config, wake))
    await client.start()
    try:
        await serve_all(client, "thread")
    finally:
        await client.close()


async def test_an_engine_that_dies_fails_what_it_had_and_serves_again(config: EngineConfig) -> None:
    client = LocalEngine(config, Supervision(start_timeout_s=WAIT_S))
    await client.start()
    try:
        await serve_all(client, "first")
        (stream,) = client.submit(ask("cut", LONG.grammar, max_tokens=390))
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        _, end = await read(stream)
        assert end.error is not None
        assert end.error.code == "engine_restarting"
        async with asyncio.timeout(WAIT_S):
            while not client.healthy or client.num_restarts == 0:
                await asyncio.sleep(0.05)
        await serve_all(client, "second")
    finally:
        await client.close()
