"""A cluster of engines: which one serves, and what becomes of requests when one is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.local import LocalEngine
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.reports import shortage
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineOverloaded, EngineUnavailable
from loraplex.serving.supervision.engine_supervisor import Supervision
from support.cluster.inprocess import InProcessEngineClient
from support.cluster.scripted import ScriptedSession
from support.engine.fake_core import CRASH, SLOW, FakeCore, FakeEngine, build_fake_engine, fake_tokens
from support.engine.fake_engine import fake_engine_info

FAKE_ENGINE = (sys.executable, str(Path(__file__).parents[2] / "support" / "engine" / "fake_core.py"))
LONG = 1_000_000
WAIT_S = 60


def replica(number: int, **config: int) -> Replica:
    engine = EngineConfig("ok", "/nowhere", **config)  # type: ignore[arg-type]
    session = LocalEngine(engine, Supervision(command=FAKE_ENGINE, start_timeout_s=WAIT_S))
    return Replica(f"replica-{number}", session)


@pytest.fixture
async def cluster() -> AsyncIterator[Engines]:
    cluster = Engines(replica(number) for number in range(3))
    await cluster.start()
    yield cluster
    await cluster.close()


def ask(
    name: str, max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3), tenant: str = "acme"
) -> EngineRequest:
    return EngineRequest(name, tenant, prompt, SamplingParams(max_tokens))


def adapter(number: int) -> AdapterRef:
    return AdapterRef("acme", f"a{number}", 1, f"{number:064x}", 8)


async def read(stream: RequestStream) -> tuple[tuple[int, ...], TokenEvent]:
    events = [event async for event in stream]
    assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    return tuple(token for event in events for token in event.token_ids), events[-1]


def kill(found: Replica) -> None:
    assert found.session.pid is not None
    os.kill(found.session.pid, signal.SIGKILL)


def holder(cluster: Engines) -> Replica:
    """The only replica with requests."""
    (found,) = [replica for replica in cluster.replicas if replica.session.num_live]
    return found


async def test_requests_are_spread_over_the_engines(cluster: Engines) -> None:
    streams = [cluster.submit(ask(f"r{number}", LONG, (number,)))[0] for number in range(12)]
    assert {replica.session.num_live for replica in cluster.replicas} <= {3, 4, 5}
    for stream in streams:
        stream.abort()
    for stream in streams:
        assert (await read(stream))[1].finish_reason == "abort"
    assert cluster.num_live == 0


async def test_what_has_no_token_goes_on_elsewhere(cluster: Engines) -> None:
    """The first prompt keeps its engine busy, so that nothing behind it begins."""
    request = ask("slow", 40, (SLOW, 1))
    stream = cluster.submit(request)[0]
    lost = holder(cluster)
    kill(lost)
    async with asyncio.timeout(WAIT_S):
        tokens, last = await read(stream)
    assert tokens == fake_tokens(request)
    assert last.finish_reason == "length"


async def until_away(lost: Replica) -> None:
    async with asyncio.timeout(WAIT_S):
        while lost.session.healthy:
            await asyncio.sleep(0)


async def test_one_engine_alone_tells_at_once() -> None:
    cluster = Engines([replica(0)])
    await cluster.start()
    try:
        stream = cluster.submit(ask("slow", 40, (SLOW, 1)))[0]
        kill(holder(cluster))
        async with asyncio.timeout(WAIT_S):
            _, last = await read(stream)
        assert last.error is not None
        assert (last.error.code, cluster.healthy) == ("engine_restarting", False)
    finally:
        await cluster.close()


async def test_it_waits_for_an_engine_that_is_being_started(cluster: Engines) -> None:
    request = ask("slow", 40, (SLOW, 1))
    stream = cluster.submit(request)[0]
    lost = holder(cluster)
    for other in cluster.replicas:
        if other is not lost:
            kill(other)
            await until_away(other)
    kill(lost)
    await until_away(lost)
    assert (cluster.num_live, cluster.healthy) == (1, False)
    async with asyncio.timeout(WAIT_S):
        assert (await read(stream))[0] == fake_tokens(request)


async def test_a_request_that_ends_its_engine_ends_two_at_most(cluster: Engines) -> None:
    async with asyncio.timeout(WAIT_S):
        _, last = await read(cluster.submit(ask("crash", prompt=(CRASH,)))[0])
        assert last.error is not None
        assert last.error.code == "engine_restarting"
        assert (await read(cluster.submit(ask("next"))[0]))[1].finish_reason == "length"
        while not all(replica.session.healthy for replica in cluster.replicas):
            await asyncio.sleep(0.01)
    assert cluster.num_restarts == 2
    assert cluster.num_live == 0


async def test_one_that_is_given_up_while_it_waits_is_not_served(cluster: Engines) -> None:
    stream = cluster.submit(ask("slow", 40, (SLOW, 1)))[0]
    lost = holder(cluster)
    for other in cluster.replicas:
        if other is not lost:
            kill(other)
            await until_away(other)
    kill(lost)
    await until_away(lost)
    stream.abort()
    assert (await read(stream))[1].finish_reason == "abort"
    assert cluster.num_live == 0


async def test_a_draining_engine_gets_nothing_new(cluster: Engines) -> None:
    first = cluster.submit(ask("first", LONG))[0]
    drained = holder(cluster)
    cluster.drain(drained.id)
    others = [cluster.submit(ask(f"r{number}", LONG, (number,)))[0] for number in range(9)]
    assert drained.session.num_live == 1
    assert not first.finished
    for stream in (first, *others):
        stream.abort()
        await read(stream)


async def test_a_pin_that_is_taken_away_on_its_way_does_not_stay(cluster: Engines) -> None:
    """A round may pin a version at its new engine while it is being unpinned."""
    late = cluster.replicas[0].session
    await late.pin(adapter(1))
    await cluster.placing.round(cluster.replicas)
    assert adapter(1).digest not in late.pins
    assert [entry.pinned for entry in await cluster.cache()] == [False]


async def test_what_is_forgotten_needs_no_engine_that_is_away(cluster: Engines) -> None:
    await cluster.pin(adapter(1))
    (pinned,) = [each for each in cluster.replicas if adapter(1).digest in each.session.pins]
    kill(next(each for each in cluster.replicas if each is not pinned))
    await cluster.drop(adapter(1).digest)
    for each in cluster.replicas:
        if each.session.healthy:
            kill(each)
            await until_away(each)
    with pytest.raises(EngineUnavailable):
        await cluster.drop(adapter(1).digest)


async def test_one_that_joins_serves_and_knows_the_terms(cluster: Engines) -> None:
    for each in cluster.replicas:
        cluster.drain(each.id)
    with pytest.raises(EngineUnavailable, match="draining"):
        cluster.submit(ask("nobody"))
    assert not cluster.healthy
    newcomer = replica(9)
    await newcomer.session.start()
    cluster.join(newcomer)
    assert (await read(cluster.submit(ask("r"))[0]))[1].finish_reason == "length"
    cluster.leave(newcomer.id)
    await newcomer.session.close()
    assert [each.id for each in cluster.replicas] == ["replica-0", "replica-1", "replica-2"]


async def test_restarts_of_an_engine_that_is_away_stay_in_the_count() -> None:
    cluster = Engines(engines_dial=True)
    for restarts in (2, 3):
        session = ScriptedSession(fake_engine_info())
        session.num_restarts = restarts
        cluster.join(Replica("one", session))
        assert cluster.num_restarts == restarts
        cluster.leave("one")
        assert cluster.num_restarts == restarts


async def test_a_full_engine_leaves_it_to_another() -> None:
    cluster = Engines([replica(0, max_num_seqs=2, max_waiting=2), replica(1, max_num_seqs=2, max_waiting=2)])
    await cluster.start()
    try:
        streams = [cluster.submit(ask(f"r{number}", LONG, (7,)))[0] for number in range(8)]
        assert [each.session.num_live for each in cluster.replicas] == [4, 4]
        with pytest.raises(EngineOverloaded):
            cluster.submit(ask("more"))
        for stream in streams:
            stream.abort()
            await read(stream)
    finally:
        await cluster.close()


async def test_a_pin_moves_when_its_engine_is_gone(cluster: Engines) -> None:
    await cluster.pin(adapter(1))
    (pinned,) = [each for each in cluster.replicas if adapter(1).digest in each.session.pins]
    await cluster.placing.round(cluster.replicas)
    assert [each.pinned for each in await cluster.cache()] == [True]
    cluster.leave(pinned.id)
    await cluster.placing.round(cluster.replicas)
    assert [(entry.ref, entry.pinned, len(entry.replicas)) for entry in await cluster.cache()] == [
        (adapter(1), True, 1)
    ]
    await pinned.session.close()


async def test_engines_are_told_what_lives_elsewhere() -> None:
    """Two versions, each loaded on both engines, have one home each."""
    cores: list[FakeCore] = []

    def build(wake: Callable[[], None]) -> FakeEngine:
        built = build_fake_engine(EngineConfig("ok", "/nowhere"), wake)
        assert isinstance(built.core, FakeCore)
        cores.append(built.core)
        return built

    cluster = Engines(Replica(f"replica-{number}", InProcessEngineClient(build)) for number in range(2))
    await cluster.start()
    try:
        refs = [adapter(number) for number in (1, 2, 3)]
        for each in cluster.replicas:
            each.session.prefetch(refs)
            async with asyncio.timeout(WAIT_S):
                while len(each.session.hot) < len(refs):
                    await each.session.stats()
        streams = [cluster.submit(replace(ask(ref.name, LONG), adapter=ref))[0] for ref in refs]
        async with asyncio.timeout(WAIT_S):
            while len(cluster.homes.places) < len(refs):  # demand rises within seconds
                await cluster.placing.round(cluster.replicas)
        await cluster.stats()  # behind what they were told
        told = [core.elsewhere for core in cores]
        assert told[0] | told[1] == {ref.digest for ref in refs}
        assert not told[0] & told[1]
        for stream in streams:
            stream.abort()
    finally:
        await cluster.close()


async def test_thirty_two_streams_outlive_five_kills(cluster: Engines) -> None:
    """One of three engines is killed, five times; whatever it was writing goes on within a second."""
    for life in range(1, 6):
        requests = [
            replace(
                ask(f"{life}-{number}", 600, (number, 1)),
                adapter=adapter(number % 5) if number % 3 else None,
                adapter_from=number % 2 if number % 3 else 0,  # of activated ones
            )
            for number in range(32)
        ]
        streams = [cluster.submit(request)[0] for request in requests]
        tokens = [list((await anext(stream)).token_ids) for stream in streams]
        lost = max(cluster.replicas, key=lambda each: each.session.num_live)
        before = cluster.num_restarts
        kill(lost)
        await until_away(lost)
        gone_at = asyncio.get_running_loop().time()
        others = [each for each in cluster.replicas if each is not lost]
        while sum(each.session.num_live for each in others) < cluster.num_live:
            await asyncio.sleep(0)
        went_on_at = asyncio.get_running_loop().time()
        for request, stream, sofar in zip(requests, streams, tokens, strict=True):
            rest, last = await read(stream)
            assert last.finish_reason == "length"
            assert (*sofar, *rest) == fake_tokens(request)
        assert went_on_at - gone_at < 1
        async with asyncio.timeout(WAIT_S):
            while cluster.num_restarts == before or not lost.session.healthy:
                await asyncio.sleep(0.01)
            # One that dies five times with nothing served between stays down.
            await read(lost.session.submit(ask(f"{life}-served"))[0])


async def test_it_reports_its_engines_and_where_adapters_live(cluster: Engines) -> None:
    ref = adapter(1)
    await cluster.pin(ref)
    await cluster.placing.round(cluster.replicas)
    (placed,) = cluster.placed(10)
    assert placed.ref == ref
    assert [place.reason for place in placed.places] == ["home"]
    assert cluster.placed(10, ref.digest) == []
    home = next(each for each in cluster.replicas if ref.digest in each.session.pins)
    assert placed.places[0].member == home.id
    async with asyncio.timeout(WAIT_S):
        while home.report().num_hot != 1:
            await asyncio.sleep(0)
    reports = {report.id: report for report in cluster.reports()}
    assert [report.num_hot for report in reports.values() if report.id != home.id] == [0, 0]
    assert {report.state for report in reports.values()} == {"ready"}
    assert (cluster.num_wanted, shortage(cluster.reports(), cluster.num_wanted)) == (3, None)
    assert set(await cluster.replica_stats()) == reports.keys()


async def test_it_says_which_engine_is_missing(cluster: Engines) -> None:
    lost = cluster.replicas[1]
    kill(lost)
    await until_away(lost)
    cluster.drain("replica-2")
    said = shortage(cluster.reports(), cluster.num_wanted)
    assert said is not None
    assert said.startswith("1 of 3 engines take requests: replica-1: ")
    assert said.endswith("; replica-2: it is drained: it finishes what it has and takes nothing new")
    assert set(await cluster.replica_stats()) == {"replica-0", "replica-2"}


async def test_it_counts_what_went_on_elsewhere(cluster: Engines) -> None:
    stream = cluster.submit(ask("slow", 2, (SLOW, 1)))[0]
    assert cluster.num_failed_over == 0
    kill(holder(cluster))
    async with asyncio.timeout(WAIT_S):
        await read(stream)
    assert (cluster.num_failed_over, cluster.num_continued) == (1, 0)
    stream = cluster.submit(ask("begun", 1000))[0]
    await anext(stream)
    kill(holder(cluster))
    async with asyncio.timeout(WAIT_S):
        await read(stream)
    assert (cluster.num_failed_over, cluster.num_continued) == (2, 1)
