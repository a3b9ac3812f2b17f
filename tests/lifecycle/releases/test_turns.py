"""Turns of watched releases: none waits for all of another tenant's, and none is looked at without need."""

from __future__ import annotations

import time

import pytest
from sqlalchemy.orm import Session

from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.release_types import ReleasePlan, ReleaseTarget
from loraplex.lifecycle.releases import rounds
from loraplex.lifecycle.releases.look import Change, look
from support.control.plane import ControlPlane
from support.releases.watched import GUARD, STEPS, Watched

BY_TIME = ReleasePlan(schedule=STEPS)
GUARDED = ReleasePlan(guard=GUARD)


@pytest.fixture
def watched(plane: ControlPlane) -> Watched:
    return Watched(plane)


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The releases of all looks from now on."""
    found: list[str] = []

    def counted(session: Session, run: ReleaseRun, now: float) -> Change | None:
        found.append(f"{run.tenant_id}/{run.name}")
        return look(session, run, now)

    monkeypatch.setattr(rounds, "look", counted)
    return found


def test_a_schedule_without_a_guard_is_looked_at_when_its_step_is_due(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.put(BY_TIME, v1=100, v2=0)
    server, looks = watched.server(), looked_at(monkeypatch)
    changes = [(watched.seconds, change.event) for _ in range(60) for change in watched.round(server)]
    assert changes == [(60.0, "release_step")]
    assert len(looks) < 15


def test_a_step_that_its_guard_holds_is_looked_at_like_one_that_goes_on(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over, and without new requests a look finds nothing new."""
    watched.put(ReleasePlan(guard=GUARD, schedule=STEPS), v1=100, v2=0)
    server, looks = watched.server(), looked_at(monkeypatch)
    watched.round(server, after=61.0)
    for _ in range(20):
        assert watched.round(server) == []
    assert len(looks) == 5


def test_a_paused_release_is_looked_at_rarely(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over, and servers still write what runs."""
    watched.put(BY_TIME, v1=100, v2=0)
    watched.plane.releases.pause("acme", "pirate")
    server, looks = watched.server(), looked_at(monkeypatch)
    watched.round(server, after=61.0)
    for _ in range(20):
        watched.running(2, [1.0])
        assert watched.round(server) == []
    assert len(looks) == 5


def test_many_releases_of_one_tenant_do_not_delay_a_neighbour(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round has a bounded number of looks at one tenant's; all of them get their turn."""
    monkeypatch.setattr(rounds, "MAX_LOOKS", 2)
    plane = watched.plane
    plane.tenants.create("zeta", weight=1.0)
    for tenant, name in [*(("acme", f"many{n}") for n in range(5)), ("zeta", "only")]:
        for seed in (1, 2):
            plane.add(tenant, name, seed)
        plane.releases.put(tenant, name, [ReleaseTarget("v1", 1), ReleaseTarget("v2", 1)], plan=GUARDED)
    server, looks = watched.server(), looked_at(monkeypatch)
    watched.began = time.time()
    for number in range(3):
        watched.round(server, after=5.0 * (number == 0) + 1.0)
        found, looks[:] = list(looks), []
        assert len(found) <= 3
        assert ("zeta/only" in found) == (number == 0)
    assert all(server._looked[each] > watched.began for each in server.watched if each.name != "pirate")


def test_a_tenant_with_many_watched_releases_does_not_keep_others_waiting(watched: Watched) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    plane = watched.plane
    plane.tenants.create("zeta", weight=1.0)
    for tenant, name in (("acme", "another"), ("acme", "more"), ("zeta", "only")):
        for seed in (1, 2):
            plane.add(tenant, name, seed)
        plane.releases.put(tenant, name, [ReleaseTarget("v1", 1), ReleaseTarget("v2", 1)], plan=GUARDED)
    server = watched.server()
    watched.round(server)
    order = [(each.tenant_id, each.name) for each in server.watched]
    assert order == [("acme", "another"), ("zeta", "only"), ("acme", "more"), ("acme", "pirate")]
