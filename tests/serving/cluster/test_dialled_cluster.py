"""A cluster of engines that dial in: they join and leave, and what one had goes on with another."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from loraplex.engine.types import EngineRequest
from loraplex.serving.dialling.remote import RemoteEngine
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.stream import RequestStream
from support.engine.dialled import dialling, listening
from support.engine.fake_core import fake_tokens
from support.engine.fake_processes import ask, until


async def check(stream: RequestStream, request: EngineRequest) -> None:
    tokens = [token async for event in stream for token in event.token_ids]
    assert tuple(tokens) == fake_tokens(request)


def connect(cluster: Engines) -> dict[str, Any]:
    """Callbacks of a port by which engines are the cluster's."""

    def on_join(replica: str, node: str, session: RemoteEngine) -> None:
        cluster.join(Replica(replica, session, node))

    return {"on_join": on_join, "on_leave": cluster.leave}


async def test_requests_of_a_killed_engine_are_answered_by_another() -> None:
    cluster = Engines()
    async with listening(**connect(cluster)) as port:
        async with dialling(port.number, "one"), dialling(port.number, "two"):
            await until(lambda: len(cluster.replicas) == 2)
            victim = cluster.replicas[0].session
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGSTOP)  # so that nothing of its answers has begun
            requests = [ask(f"r{i}", 50, (i,)) for i in range(16)]
            streams = [cluster.submit(request)[0] for request in requests]
            assert 0 < victim.num_live < 16
            os.kill(victim.pid, signal.SIGKILL)
            await asyncio.gather(*map(check, streams, requests))
            assert cluster.num_live == 0
            await until(lambda: [replica.id for replica in cluster.replicas] == ["one", "two"])
        await until(lambda: not cluster.replicas)
        assert cluster.unhealthy_reason == "no engine has joined"
    await cluster.close()


async def test_an_engine_that_drains_gives_its_place_up() -> None:
    cluster = Engines()
    async with listening(**connect(cluster)) as port, dialling(port.number, "one") as one:
        async with dialling(port.number, "two") as two:
            await until(lambda: len(cluster.replicas) == 2)
            requests = [ask(f"r{i}", 300, (i,)) for i in range(8)]
            streams = [cluster.submit(request)[0] for request in requests]
            draining = asyncio.create_task(two.relay.drain(60))
            await asyncio.gather(draining, *map(check, streams, requests))
            await until(lambda: [replica.id for replica in cluster.replicas] == ["one"])
            request = ask("late")
            await check(cluster.submit(request)[0], request)
        assert one.relay.num_live == 0
    await cluster.close()


async def test_an_engine_that_drains_stays_while_it_is_asked_for_its_prefixes() -> None:
    cluster = Engines()
    async with listening(**connect(cluster)) as port, dialling(port.number, "one") as one:
        await until(lambda: len(cluster.replicas) == 1)
        session = cluster.replicas[0].session
        session.on_leaving = lambda: setattr(session, "hands_over", True)
        draining = asyncio.create_task(one.relay.drain(60))
        await until(lambda: session.hands_over)
        assert not session.healthy
        assert (await asyncio.wait({draining}, timeout=0.2))[1] == {draining}
        session.handed_over()
        await draining
        await until(lambda: not cluster.replicas)
    await cluster.close()
