"""A conversation stays with the engine that has its KV blocks, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import EngineRequest, SamplingParams
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from support.cluster.scripted import ScriptedSession
from support.engine.fake_engine import fake_engine_info
from support.virtual_time import VirtualTimeLoop

BLOCK = fake_engine_info().block_size
INVOCATION = (8, 9)
JUDGE = AdapterRef("acme", "judge", 1, "d" * 64, 8, INVOCATION)
PLAIN = AdapterRef("acme", "plain", 1, "e" * 64, 8)


class Asker:
    """Asks a cluster of four engines one request after the other."""

    def __init__(self, cluster: Engines) -> None:
        self.cluster = cluster
        self.num_asked = 0

    async def served_by(self, prompt: tuple[int, ...], **changes: Any) -> str:
        """The engine that serves such a request, when all are idle."""
        self.num_asked += 1
        request = EngineRequest(f"r{self.num_asked}", "acme", prompt, SamplingParams(1))
        (stream,) = self.cluster.submit(replace(request, **changes))
        (name,) = [report.id for report in self.cluster.reports() if report.num_live]
        assert [event async for event in stream][-1].finish_reason == "length"
        return name

    async def activated(self, history: tuple[int, ...], **changes: Any) -> str:
        """The engine that serves the activated adapter behind this history."""
        place = {"adapter": JUDGE, "adapter_from": len(history)}
        return await self.served_by((*history, *INVOCATION, 3), **place, **changes)


def on_four_engines(story: Callable[[Asker], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        sessions = [ScriptedSession(fake_engine_info()) for _ in range(4)]
        replicas = [Replica(f"replica-{number}", session) for number, session in enumerate(sessions)]
        cluster = Engines(replicas, clock=asyncio.get_running_loop().time)
        await cluster.start()
        await story(Asker(cluster))
        await cluster.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def history(number: int, length: int = 2 * BLOCK) -> tuple[int, ...]:
    return tuple(100 + (number * 37 + place) % 800 for place in range(length))


def test_an_activated_adapter_goes_where_its_conversation_on_the_base_went() -> None:
    async def story(asker: Asker) -> None:
        used = set()
        for number in range(24):
            base = await asker.served_by(history(number))
            assert await asker.activated(history(number)) == base
            longer = history(number) + history(number + 100)
            assert await asker.served_by(longer) == await asker.activated(longer) == base
            used.add(base)
        assert len(used) == 4, "conversations are spread"

    on_four_engines(story)


def test_one_that_acts_within_the_first_block_goes_where_its_adapter_lives() -> None:
    async def story(asker: Asker) -> None:
        short = [await asker.activated(history(number, BLOCK - 1)) for number in range(24)]
        plain = [await asker.served_by(history(number), adapter=PLAIN) for number in range(24)]
        assert len(set(short)) == len(set(plain)) == 1

    on_four_engines(story)


def test_one_that_must_not_wait_for_a_load_goes_where_its_adapter_lives() -> None:
    async def story(asker: Asker) -> None:
        found = [await asker.activated(history(number), max_load=0.0) for number in range(24)]
        assert len(set(found)) == 1

    on_four_engines(story)


def test_tenants_that_share_no_blocks_share_no_order() -> None:
    async def story(asker: Asker) -> None:
        names = {await asker.served_by(history(1), tenant_id=f"tenant-{number}") for number in range(24)}
        assert len(names) == 4

    on_four_engines(story)
