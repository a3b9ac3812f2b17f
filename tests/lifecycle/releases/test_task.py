"""A server's part in watched releases: loads of their versions, log lines, metrics."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from sqlalchemy import update

from loraplex.control.db.tables import AdapterVersion
from loraplex.control.release_types import ReleasePlan
from loraplex.lifecycle.releases.look import RollbackCause
from loraplex.lifecycle.releases.task import LOAD_AGAIN_S, ReleaseTask
from support.control.plane import ControlPlane, FakeClock
from support.engine.fake_engine import FakeEngineClient
from support.http.quiet import all_levels
from support.releases.watched import STEPS, Watched


class Meter:
    def __init__(self) -> None:
        self.causes: list[RollbackCause] = []
        self.rounds: list[tuple[int, bool]] = []

    def rolled_back(self, cause: RollbackCause) -> None:
        self.causes.append(cause)

    def round_ended(self, *, num_running: int, leads: bool) -> None:
        self.rounds.append((num_running, leads))


@pytest.fixture
def watched(plane: ControlPlane) -> Watched:
    return Watched(plane)


def task(watched: Watched, name: str, meter: Meter, clock: FakeClock) -> ReleaseTask:
    plane = watched.plane
    return ReleaseTask(watched.server(name), plane.database, plane.releases, meter, clock=clock)


async def test_every_server_keeps_the_arms_loaded_while_the_release_is_watched(watched: Watched) -> None:
    watched.put(ReleasePlan(schedule=STEPS), v1=100, v2=0)
    arms = [watched.plane.catalog.get_version("acme", "pirate", version).digest for version in ("v1", "v2")]
    clock = FakeClock()
    servers = [(task(watched, name, Meter(), clock), FakeEngineClient()) for name in "ab"]

    async def loads() -> list[list[str]]:
        found = []
        for server, engine in servers:
            engine.prefetches.clear()
            await server.round(engine)
            found.append(list(engine.prefetches))
        return found

    assert await loads() == [arms, arms]
    assert await loads() == [[], []]
    clock.advance(LOAD_AGAIN_S)
    assert await loads() == [arms, arms]
    watched.seconds = 60.0
    assert (await loads())[1] == arms, "a step is a release to load for"
    watched.seconds = 200.0
    await loads()
    assert await loads() == [[], []], "it is promoted, and nothing watches it"


async def test_what_a_server_does_is_in_its_log_and_its_metrics(watched: Watched) -> None:
    watched.put(ReleasePlan(schedule=STEPS), v1=100, v2=0)
    meter, other = Meter(), Meter()
    leader, second = task(watched, "a", meter, FakeClock()), task(watched, "b", other, FakeClock())
    engine = FakeEngineClient()
    with all_levels(), structlog.testing.capture_logs() as lines:
        await leader.round(engine)
        await second.round(engine)
        watched.seconds = 60.0
        await leader.round(engine)
        with watched.plane.database.write() as session:
            session.execute(update(AdapterVersion).where(AdapterVersion.number == 2).values(state="corrupt"))
        await leader.round(engine)
        await leader.round(engine)
    assert [(line["event"], line.get("reason")) for line in lines] == [
        ("release_leader", None),
        ("release_step", None),
        ("release_rolled_back", "v2 is corrupt"),
        ("release_leader", None),
    ]
    assert lines[1].items() >= {"tenant": "acme", "adapter": "pirate", "revision": 3}.items()
    assert meter.causes == ["unusable"]
    assert meter.rounds == [(1, True), (1, True), (1, True), (0, False)]
    assert other.rounds == [(1, False)]


async def test_a_server_that_ends_lets_the_next_one_lead_at_once(watched: Watched) -> None:
    watched.put(ReleasePlan(schedule=STEPS), v1=100, v2=0)
    meter = Meter()
    running = asyncio.create_task(
        task(watched, "a", meter, FakeClock()).run(FakeEngineClient(), interval_s=0.001)
    )
    async with asyncio.timeout(60):
        while (1, True) not in meter.rounds:
            await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    other = watched.server("b")
    watched.round(other)
    assert other.term is not None
