"""Requests that have lost their engine wait for one to dial in, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.failover import PATIENCE_S
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineUnavailable
from support.cluster.scripted import STEP_S, ScriptedSession
from support.engine.fake_core import fake_tokens
from support.engine.fake_engine import fake_engine_info
from support.virtual_time import VirtualTimeLoop

REQUEST = EngineRequest("r", "acme", (1, 2), SamplingParams(20))
ACTIVATED = replace(
    REQUEST,
    prompt_ids=(1, 2, 8, 9, 3),
    adapter=AdapterRef("acme", "judge", 1, "d" * 64, 8, (8, 9)),
    adapter_from=2,
)
"""Its invocation begins at position 2."""


async def join(
    cluster: Engines, numerics: str = "wide", name: str = "one", max_model_len: int = 4096
) -> ScriptedSession:
    """An engine that dials in; each connection of an engine process has the same `life` here."""
    info = fake_engine_info(numerics=numerics, max_model_len=max_model_len)
    session = ScriptedSession(info, restarts=False)
    await session.start()
    cluster.join(Replica(name, session))
    return session


def lose(cluster: Engines, session: ScriptedSession, name: str = "one") -> None:
    session.kill()
    cluster.leave(name)


async def read(stream: RequestStream) -> tuple[tuple[int, ...], TokenEvent]:
    events = [event async for event in stream]
    return tuple(token for event in events for token in event.token_ids), events[-1]


def in_virtual_time(
    story: Callable[[Engines], Coroutine[Any, Any, None]], *, engines_dial: bool = True
) -> None:
    async def run() -> None:
        cluster = Engines(engines_dial=engines_dial, clock=asyncio.get_running_loop().time)
        await story(cluster)
        assert cluster.num_live == 0
        await cluster.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


@pytest.mark.parametrize("request_", [REQUEST, ACTIVATED], ids=["base", "activated"])
@pytest.mark.parametrize("steps", [0, 7])
@pytest.mark.parametrize("away_s", [0.1, 14.0])
def test_an_engine_that_dials_again_goes_on_where_it_was(
    steps: int, away_s: float, request_: EngineRequest
) -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(request_)
        await asyncio.sleep((steps + 0.5) * STEP_S)
        assert stream.num_received == steps
        lose(cluster, session)
        await asyncio.sleep(away_s)
        assert (stream.finished, cluster.num_live) == (False, 1)
        await join(cluster)
        tokens, last = await read(stream)
        assert (tokens, last.finish_reason) == (fake_tokens(request_), "length")
        assert last.usage is not None
        assert last.usage.completion_tokens == len(tokens)

    in_virtual_time(story)


def test_no_engine_comes() -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        lose(cluster, session)
        lost_at = asyncio.get_running_loop().time()
        with pytest.raises(
            EngineUnavailable
        ):  # what is new is refused at once, and may be sent to another server
            cluster.submit(EngineRequest("new", "acme", (1,), SamplingParams(1)))
        _, last = await read(stream)
        assert last.error is not None
        assert last.error.code == "engine_restarting"
        assert PATIENCE_S <= asyncio.get_running_loop().time() - lost_at < PATIENCE_S + 1

    in_virtual_time(story)


@pytest.mark.parametrize(("steps", "ends"), [(0, "length"), (3, "error")])
def test_an_engine_of_other_numerics_serves_what_has_not_begun(steps: int, ends: str) -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        await asyncio.sleep((steps + 0.5) * STEP_S)
        lose(cluster, session)
        await join(cluster, "narrow")
        assert (await read(stream))[1].finish_reason == ends

    in_virtual_time(story)


def test_an_engine_of_a_shorter_context_is_not_waited_for() -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        lose(cluster, session)
        most = len(REQUEST.prompt_ids) + REQUEST.sampling.max_tokens
        short = await join(cluster, name="short", max_model_len=most - 1)
        await asyncio.sleep(1.0)
        assert (short.num_live, stream.finished) == (0, False)
        long = await join(cluster, name="long", max_model_len=most)
        await asyncio.sleep(2 * STEP_S)
        assert (short.num_live, long.num_live) == (0, 1)
        assert (await read(stream))[0] == fake_tokens(REQUEST)

    in_virtual_time(story)


def test_the_second_loss_ends_it_at_once() -> None:
    async def story(cluster: Engines) -> None:
        first = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        lose(cluster, first)
        second = await join(cluster)
        await asyncio.sleep(3 * STEP_S)
        assert second.num_live == 1
        lose(cluster, second)
        assert stream.finished

    in_virtual_time(story)


def test_sequences_that_are_lost_one_after_the_other_are_one_loss() -> None:
    async def story(cluster: Engines) -> None:
        first = await join(cluster)
        requests = [replace(REQUEST, request_id=f"r{number}") for number in range(3)]
        streams = cluster.submit(*requests)
        second = await join(cluster, name="two")
        await asyncio.sleep(3 * STEP_S)
        for number, request in enumerate(requests):
            first.cut(request.request_id)
            await asyncio.sleep(2 * STEP_S)
            assert (first.num_live, second.num_live) == (2 - number, number + 1)
        lose(cluster, first)
        for stream in streams:
            assert (await read(stream))[0] == fake_tokens(REQUEST)

    in_virtual_time(story)


def test_a_request_that_waits_may_be_given_up() -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        lose(cluster, session)
        await asyncio.sleep(1.0)
        stream.abort()
        assert (await read(stream))[1].finish_reason == "abort"

    in_virtual_time(story)


def test_where_no_engine_dials_it_ends_at_once() -> None:
    async def story(cluster: Engines) -> None:
        session = await join(cluster)
        (stream,) = cluster.submit(REQUEST)
        lose(cluster, session)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stream.finished

    in_virtual_time(story, engines_dial=False)
