"""The evidence over time of a watched release: kept with it, read by each server, begun again with it."""

from __future__ import annotations

import pytest

from loraplex.control.db.database import Database
from loraplex.control.release_types import ReleasePlan
from loraplex.lifecycle.release_comparison import compare_release
from loraplex.lifecycle.release_guard.course import Leg
from support.control.plane import ControlPlane
from support.releases.watched import GUARD, STEPS, Watched

BOTH = ReleasePlan(guard=GUARD, schedule=STEPS)


@pytest.fixture
def watched(plane: ControlPlane) -> Watched:
    return Watched(plane)


def legs(watched: Watched) -> list[Leg]:
    """As another server reads them."""
    database = Database(watched.plane.url)
    try:
        return compare_release(database, "acme", "pirate").course.legs
    finally:
        database.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_the_line_crosses_its_threshold_where_the_release_goes_back(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server = watched.server()
    assert legs(watched) == []
    while not watched.changes:
        watched.ended(1, 8)
        watched.ended(2, 6)
        watched.ended(2, 2, status="internal_error")
        watched.round(server)
    [leg] = legs(watched)
    assert (leg.step, leg.since) == (0, watched.began)
    parts = [point.part for point in leg.all_points]
    assert all(part < 1 for part in parts[:-1])
    assert parts[-1] >= 1
    assert [point.requests for point in leg.all_points] == [8 * n for n in range(1, len(parts) + 1)]
    needs = [point.needs for point in leg.all_points]
    assert needs[0] > 0
    assert needs[-1] == 0
    assert leg.latest.at == watched.now()


def test_each_step_and_each_resume_begins_a_line_of_its_own(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server = watched.server()

    def look() -> None:
        watched.ended(1, 100)
        watched.ended(2, 100)
        watched.round(server, after=1.0)

    look()
    watched.round(server, after=61.0)
    assert watched.release().run.step == 1  # type: ignore[union-attr]
    look()
    watched.plane.releases.pause("acme", "pirate")
    watched.round(server)
    watched.began, watched.seconds = watched.plane.releases.resume("acme", "pirate").run.since, 0.0  # type: ignore[union-attr]
    look()
    found = legs(watched)
    assert [leg.step for leg in found] == [0, 1, 1]
    assert len({leg.since for leg in found}) == 3
    # A new release is a new test, whether the one before has ended or not.
    watched.plane.releases.rollback("acme", "pirate")
    for shares in ({"v1": 50, "v2": 50}, {"v1": 100, "v2": 1}):
        watched.put(ReleasePlan(guard=GUARD), **shares)
        assert legs(watched) == []
        look()
        assert [leg.step for leg in legs(watched)] == [0]


def test_a_look_without_news_adds_nothing(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server = watched.server()
    watched.ended(1, 8)
    watched.ended(2, 2)
    watched.round(server)
    before = legs(watched)
    for _ in range(5):
        watched.round(server, after=6.0)
    assert legs(watched) == before
