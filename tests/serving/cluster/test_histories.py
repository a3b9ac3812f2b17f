"""Seeded histories of a cluster in virtual time: engines are killed, hang, drain, join and leave while requests come,
are given up, or end their engine. Each request has one end, and its tokens are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.types import EngineRequest, SamplingParams, TokenEvent
from loraplex.serving.engines.engines import Engines
from loraplex.serving.engines.replica import Replica
from loraplex.serving.engines.stream import RequestStream
from loraplex.serving.errors import EngineOverloaded, ServingError
from support.cluster.scripted import ScriptedSession
from support.engine.fake_core import CRASH, fake_tokens
from support.engine.fake_engine import fake_engine_info
from support.virtual_time import VirtualTimeLoop

REQUESTS = 24
SPAN_S = 3.0
"""Time in which requests come and engines fall."""
ENDS_WITHIN_S = 60.0


@dataclass
class Story:
    """One request as its client saw it."""

    request: EngineRequest
    gives_up: bool
    tokens: list[int] = field(default_factory=list)
    ends: list[TokenEvent] = field(default_factory=list)


class History:
    """One seed's; engines may dial in where it is odd. `is_mild`: one engine of three alike falls, and no request ends
    one."""

    def __init__(self, seed: int, *, is_mild: bool = False) -> None:
        self.random = random.Random(seed)
        self.activating = random.Random(seed)  # places from which adapters act
        self.engines_dial = bool(seed % 2)
        self.is_mild = is_mild
        self.stories: list[Story] = []
        self.sessions: list[ScriptedSession] = []
        self.num_refused = 0
        self.num_poisonous = 0
        self.names = 0

    def replica(self, *, restarts: bool) -> Replica:
        self.names += 1
        numerics = "wide" if self.is_mild else self.random.choice(["wide", "wide", "wide", "narrow"])
        info = fake_engine_info(max_num_seqs=4, max_waiting=64, numerics=numerics)
        self.sessions.append(ScriptedSession(info, restarts=restarts))
        return Replica(f"replica-{self.names}", self.sessions[-1])

    async def run(self) -> Engines:
        loop = asyncio.get_running_loop()
        cluster = Engines(
            [self.replica(restarts=True) for _ in range(3 if self.is_mild else self.random.randint(1, 4))],
            engines_dial=self.engines_dial,
            clock=loop.time,
        )
        await cluster.start()
        async with asyncio.timeout(ENDS_WITHIN_S), asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(self.client(cluster, number, self.random.random() * SPAN_S))
            for _ in range(1 if self.is_mild else self.random.randint(0, 8)):
                group.create_task(self.event(cluster, self.random.random() * SPAN_S))
            group.create_task(self.place(cluster))
        return cluster

    async def place(self, cluster: Engines) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            await cluster.placing.round([each for each in cluster.replicas if each.state == "ready"])

    async def event(self, cluster: Engines, at: float) -> None:
        await asyncio.sleep(at)
        kinds = ["kill", "kill", "kill", "hang", "drain", "join", "leave"]
        kind = self.random.choice(kinds[2:4] if self.is_mild else kinds)
        replica = self.random.choice(cluster.replicas) if cluster.replicas else None
        if kind == "join" or replica is None:
            replica = self.replica(restarts=False)
            await replica.session.start()
            cluster.join(replica)
            return
        session = replica.session
        assert isinstance(session, ScriptedSession)
        if kind == "kill":
            session.kill()
        elif kind == "hang":
            session.hang()
        elif kind == "drain":
            cluster.drain(replica.id)
        elif len(cluster.replicas) > 1:
            session.kill()
            cluster.leave(replica.id)

    async def client(self, cluster: Engines, number: int, at: float) -> None:
        draw = self.random
        adapter = AdapterRef("acme", "a", 1, f"{draw.randrange(5):064x}", 8) if draw.random() < 0.7 else None
        is_poisonous = draw.random() < 0.04 and not self.is_mild
        self.num_poisonous += is_poisonous
        sampling = SamplingParams(draw.randint(1, 60))
        prompt = (CRASH if is_poisonous else number, 2)
        place = self.activating.choice([0, 1]) if adapter is not None else 0
        tenant = f"tenant-{number % 3}"
        requests = [
            EngineRequest(f"r{number}-{choice}", tenant, prompt, sampling, adapter, adapter_from=place)
            for choice in range(draw.choice([1, 1, 1, 3]))
        ]
        gives_up_at = draw.randint(0, 20) if draw.random() < 0.2 else None
        await asyncio.sleep(at)
        try:
            streams = cluster.submit(*requests)
        except ServingError:
            self.num_refused += 1
            return
        async with asyncio.TaskGroup() as group:
            for request, stream in zip(requests, streams, strict=True):
                group.create_task(self.read(request, stream, gives_up_at))

    async def read(self, request: EngineRequest, stream: RequestStream, gives_up_at: int | None) -> None:
        story = Story(request, gives_up_at is not None)
        self.stories.append(story)
        if gives_up_at == 0:
            stream.abort()
        async for event in stream:
            story.tokens += event.token_ids
            if event.finish_reason is not None:
                story.ends.append(event)
            if gives_up_at is not None and len(story.tokens) >= gives_up_at:
                stream.abort()


def check(history: History, cluster: Engines) -> None:
    for story in history.stories:
        expected = fake_tokens(story.request)
        assert len(story.ends) == 1, story
        assert tuple(story.tokens) == expected[: len(story.tokens)], story
        end = story.ends[0]
        if end.finish_reason == "length":
            assert tuple(story.tokens) == expected, story
            assert end.usage is not None
            assert end.usage.completion_tokens == len(expected)
        elif end.finish_reason == "abort":
            assert story.gives_up, story
        else:
            assert end.error is not None
            assert end.error.code == "engine_restarting", story
    assert cluster.num_live == 0
    assert cluster.served_tenants == set()
    assert sum(session.num_crashes for session in history.sessions) <= 2 * history.num_poisonous


def live_through(seed: int, *, is_mild: bool = False) -> History:
    history = History(seed, is_mild=is_mild)

    async def run() -> None:
        cluster = await history.run()
        check(history, cluster)
        await cluster.close()
        for session in history.sessions:
            await session.close()
        await asyncio.sleep(3600)
        await cluster.placing.round([])
        assert not cluster.homes.unplaced, "a request that has ended is still counted"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    return history


@pytest.mark.parametrize(
    "first", [0, 50, *(pytest.param(first, marks=pytest.mark.soak) for first in range(100, 1000, 50))]
)
def test_each_request_has_one_end(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            live_through(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_one_death_costs_nobody_an_answer() -> None:
    histories = [live_through(seed, is_mild=True) for seed in range(60)]
    stories = [story for history in histories for story in history.stories]
    assert {end.finish_reason for story in stories for end in story.ends} == {"length", "abort"}
    assert sum(history.num_refused for history in histories) == 0
    assert sum(session.num_restarts for history in histories for session in history.sessions) > 30


class CountingSession(ScriptedSession):
    """Counts how often it has no room for what it is asked to take over."""

    num_overloads = 0

    def adopt(self, streams: Sequence[RequestStream], requests: Sequence[EngineRequest]) -> None:
        try:
            super().adopt(streams, requests)
        except EngineOverloaded:
            self.num_overloads += 1
            raise


def test_the_orphans_of_a_full_cluster_wait_their_turn() -> None:
    """Two engines, each with room for one tenant's four sequences more: of 12 orphans the rest waits until answers have
    ended, and all are served. A full engine is asked for one of them now and then, not for all of them each time."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        info = fake_engine_info(max_num_seqs=8, max_waiting=4)
        sessions = [CountingSession(info, restarts=False) for _ in range(2)]
        replicas = [Replica(f"replica-{number}", session) for number, session in enumerate(sessions)]
        cluster = Engines(replicas, clock=loop.time)
        await cluster.start()
        requests = [
            EngineRequest(f"r{number}", "acme", (number,), SamplingParams(60)) for number in range(20)
        ]
        streams = [cluster.submit(request)[0] for request in requests]
        await asyncio.sleep(0.1)
        sessions[0].kill()
        cluster.leave("replica-0")
        for request, stream in zip(requests, streams, strict=True):
            story = Story(request, False)
            async for event in stream:
                story.tokens += event.token_ids
            assert tuple(story.tokens) == fake_tokens(request)
        assert loop.time() < 5
        assert 0 < sessions[1].num_overloads <= 10
        await cluster.close()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())


def test_the_histories_hold_what_they_should() -> None:
    histories = [live_through(seed) for seed in range(60)]
    ends = [end for history in histories for story in history.stories for end in story.ends]
    assert sum(end.finish_reason == "length" for end in ends) > len(ends) / 2
    assert {end.finish_reason for end in ends} == {"length", "abort", "error"}
    assert sum(session.num_restarts for history in histories for session in history.sessions) > 60
    assert sum(history.num_poisonous for history in histories) > 30
