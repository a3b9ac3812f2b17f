"""Watched releases: steps by time, rollbacks by evidence, and one leader; nothing is done twice."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import structlog
from sqlalchemy import Connection, event, select, update
from sqlalchemy.orm import Session

from loraplex.control import leases
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import Lease, ReleaseOutcome, ReleaseRun, RunningArmRow
from loraplex.control.db.tables import AdapterVersion, Release
from loraplex.control.errors import DatabaseUnavailable
from loraplex.control.release_types import ReleasePlan, ReleaseTarget
from loraplex.lifecycle.releases import rounds
from loraplex.lifecycle.releases.look import Change, look
from loraplex.lifecycle.releases.rounds import LEASE, Rounds
from support.control.plane import ControlPlane, at_once
from support.http.quiet import all_levels
from support.releases.watched import GUARD, STEPS, Watched

BY_TIME = ReleasePlan(schedule=STEPS)
GUARDED = ReleasePlan(guard=GUARD)
BOTH = ReleasePlan(guard=GUARD, schedule=STEPS)
ENOUGH = 100
"""Users of each arm with which a guard passes a step."""


@pytest.fixture
def watched(plane: ControlPlane) -> Watched:
    return Watched(plane)


def test_a_schedule_without_a_guard_advances_by_time_alone(watched: Watched) -> None:
    first = watched.put(BY_TIME, v1=100, v2=0)
    server = watched.server()
    seen = []
    for _ in range(14):
        for change in watched.round(server, after=10.0):
            seen.append((watched.seconds, change.event, watched.weights()))
    assert seen == [
        (60.0, "release_step", {"v1": 25, "v2": 75}),
        (120.0, "release_promoted", {"v2": 100}),
    ]
    assert watched.release().revision == first.revision + 2
    assert watched.stored()["audit"][-2:] == [("guard", "release.step"), ("guard", "release.promoted")]


def test_a_guard_holds_a_step_until_it_has_seen_enough_and_counts_each_request_once(watched: Watched) -> None:
    watched.put(ReleasePlan(guard={"min_requests": ENOUGH + 1}, schedule=STEPS), v1=100, v2=0)
    server = watched.server()
    watched.round(server, after=61)
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)
    assert watched.round(server) == []
    assert watched.stored()["outcomes"] == []
    assert watched.stored()["counted"] == [ENOUGH]
    for _ in range(5):
        assert watched.round(server) == []  # as many are no more for being looked at again
    watched.ended(1, 8)
    watched.ended(2, 1)
    assert [change.event for change in watched.round(server)] == ["release_step"]
    assert watched.stored()["counted"] == [0], "the next step begins without evidence"


def test_requests_of_too_few_users_pass_no_step_however_many_they_are(watched: Watched) -> None:
    """A schedule does not promote what the guard could not have found."""
    watched.put(BOTH, sticky="user", v1=100, v2=0)
    server = watched.server()
    for _ in range(30):
        watched.ended(1, 9, users=9)
        watched.ended(2, 9, users=9)
        assert watched.round(server, after=10) == []
    assert watched.stored()["counted"] == [270]
    assert watched.verdict().kind == "hold"
    assert re.fullmatch(r"needs [0-9]+ users more, or --sticky none", watched.verdict().advice or "")


def test_a_breach_rolls_back_by_itself_and_says_why(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server = watched.server(announces=True)
    while not watched.changes and watched.seconds < 10:
        watched.ended(1, 8)
        watched.ended(2, 8, status="internal_error")
        watched.round(server)
    [change] = watched.changes
    assert watched.seconds <= 10
    assert (change.event, change.cause) == ("release_rolled_back", "error_rate")
    info = watched.release()
    assert (watched.weights(), info.actor, info.origin) == ({"v1": 100}, "guard", "rollback")
    assert info.reason is not None
    assert info.reason.startswith("guard: error_rate: 100 % ended with an error (")
    assert "the control's 0 % allows 0.5 %" in info.reason
    assert info.run.status == "rolled_back"
    stored = watched.stored()
    assert stored["audit"][-1] == ("guard", "release.rolled_back")
    assert stored["deliveries"] == [("release.rolled_back", 0)]
    watched.ended(2, 3, status="internal_error")
    watched.round(server)
    assert watched.stored()["revisions"] == stored["revisions"]


def test_a_guard_without_a_schedule_looks_for_as_long_as_the_release_is_watched(watched: Watched) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    server = watched.server()
    for _ in range(9):
        watched.ended(1, 3)
        watched.ended(2, 3)
        assert watched.round(server, after=100) == []
    assert watched.weights() == {"v1": 50, "v2": 50}
    while not watched.changes and watched.seconds < 910:
        watched.ended(1, 8)
        watched.ended(2, 8, status="internal_error")
        watched.round(server)
    assert watched.weights() == {"v1": 100}


@pytest.mark.parametrize(("age_s", "is_found"), [(1.0, True), (6.0, False)])
def test_answers_that_never_end_are_found_by_fresh_rows_of_running_requests(
    watched: Watched, age_s: float, is_found: bool
) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    server = watched.server()
    watched.seconds = 50
    watched.ended(1, 60)
    watched.round(server)
    for _ in range(12):
        watched.ended(1, 8)
        watched.running(2, [5.0] * 16, age_s=age_s)
        watched.round(server)
    causes = {change.cause for change in watched.changes}
    assert causes <= {"output_length", "length_share"}
    assert bool(causes) is is_found


def test_a_pause_stops_everything_and_a_resume_begins_the_step_again(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server = watched.server()
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)
    watched.round(server)
    watched.plane.releases.pause("acme", "pirate")
    watched.ended(2, 60, status="internal_error")
    for _ in range(5):
        assert watched.round(server, after=100) == []
    assert watched.stored()["outcomes"] == []
    resumed = watched.plane.releases.resume("acme", "pirate")
    watched.began, watched.seconds = resumed.run.since, 0.0
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)
    assert watched.round(server, after=59) == []
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)
    assert [change.event for change in watched.round(server, after=2)] == ["release_step"]


def test_a_guard_that_is_paused_counts_nothing_and_goes_back_for_nothing(watched: Watched) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    server = watched.server()
    watched.round(server)
    watched.plane.releases.pause("acme", "pirate")
    for _ in range(3):
        watched.ended(1, 60)
        watched.ended(2, 60, status="internal_error")
        assert watched.round(server, after=10.0) == []
    assert watched.stored()["counted"] == [0]


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_candidate_that_is_damaged_goes_back(watched: Watched, is_paused: bool) -> None:
    watched.put(BY_TIME, v1=100, v2=0)
    if is_paused:
        watched.plane.releases.pause("acme", "pirate")
    with watched.plane.database.write() as session:
        session.get_one(AdapterVersion, ("acme", "pirate", 2)).state = "corrupt"
    [change] = watched.round(watched.server())
    assert (change.cause, change.release.reason) == ("unusable", "v2 is corrupt")
    assert watched.weights() == {"v1": 100}


def test_nothing_goes_back_while_no_version_can_serve(watched: Watched) -> None:
    watched.put(BY_TIME, v1=100, v2=0)
    with watched.plane.database.write() as session:
        session.execute(update(AdapterVersion).values(state="incompatible"))
    assert watched.round(watched.server()) == []


def test_without_anything_to_watch_nobody_leads(watched: Watched) -> None:
    server = watched.server()
    watched.round(server)
    assert (server.term, server.watched) == (None, [])
    with watched.plane.database.read() as session:
        assert session.get(Lease, LEASE) is None
    watched.put(BY_TIME, v1=100, v2=0)
    with all_levels(), structlog.testing.capture_logs() as lines:
        watched.round(server)
        watched.plane.releases.promote("acme", "pirate", "v2")
        watched.round(server)
    assert [(line["leads"], line["term"]) for line in lines] == [(True, 1), (False, 1)]
    other = watched.server("b")
    watched.put(BY_TIME, v1=100, v2=0)
    watched.round(other)
    assert other.term is not None, "the lease was given up, and not left to run out"


def test_outcomes_that_no_guard_waits_for_are_removed(watched: Watched) -> None:
    watched.ended(2, 3)
    watched.round(watched.server())
    assert watched.stored()["outcomes"] == []


def test_a_release_that_cannot_be_looked_at_keeps_none_of_the_others(watched: Watched) -> None:
    watched.plane.add("acme", "aaa", 3)
    watched.plane.add("acme", "aaa", 4)
    watched.put(BY_TIME, v1=100, v2=0)
    targets = [ReleaseTarget("v1", 50), ReleaseTarget("v2", 50)]
    watched.plane.releases.put("acme", "aaa", targets, plan=GUARDED)
    with watched.plane.database.write() as session:
        of = (Release.name == "aaa", Release.guard.is_not(None))
        session.execute(update(Release).where(*of).values(guard={"metrics": "none"}))
    server = watched.server(clock=lambda: watched.seconds)
    with all_levels(), structlog.testing.capture_logs() as lines:
        changes = watched.round(server, after=60)
        for _ in range(10):
            watched.round(server)  # it is told once a minute
    assert [change.release.name for change in changes] == ["pirate"]
    assert [(line["event"], line["adapter"]) for line in lines if line["log_level"] == "error"] == [
        ("release_not_watched", "aaa")
    ]


def test_a_release_without_news_is_looked_at_every_five_seconds(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []

    def counted(session: Session, run: ReleaseRun, now: float) -> Change | None:
        looked.append(watched.seconds)
        return look(session, run, now)

    monkeypatch.setattr(rounds, "look", counted)
    watched.put(GUARDED, v1=50, v2=50)
    server = watched.server()
    for _ in range(11):
        watched.round(server)
    assert looked == [1.0, 6.0, 11.0]
    watched.ended(2, 1)
    watched.round(server)
    watched.running(2, [12.0])
    watched.round(server)
    watched.round(server)
    assert looked[3:] == [12.0, 13.0, 14.0]


class Killed(BaseException):
    """The leader's process is gone."""


class Killer:
    """Kills the caller of this database after `left` more statements; commits count too. On PostgreSQL it cuts the
    caller's connection."""

    def __init__(self, database: Database, left: int) -> None:
        self.left = left
        self._cuts = database.on_postgres
        for name in ("before_cursor_execute", "commit"):
            event.listen(database._engine, name, self._on_statement)

    def _on_statement(self, connection: Connection, *_: Any) -> None:
        if self.left == 0 and self._cuts:
            connection.connection.dbapi_connection.close()
        elif self.left == 0:
            raise Killed
        self.left -= 1


def _step(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    watched.seconds = 61.0
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)


def _promotion(watched: Watched) -> None:
    _step(watched)
    watched.round(watched.server("before"))
    watched.end_lease()
    watched.seconds = 130.0
    watched.ended(1, ENOUGH)
    watched.ended(2, ENOUGH)


def _rollback(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    watched.seconds = 5.0
    watched.ended(1, 60)
    watched.ended(2, 60, status="internal_error")


def _evidence(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    watched.seconds = 5.0
    watched.ended(1, 8)
    watched.ended(2, 8)


@pytest.mark.parametrize(
    ("backend", "prepare", "action"),
    [
        ("sqlite", _step, "release.step"),
        ("sqlite", _promotion, "release.promoted"),
        ("sqlite", _rollback, "release.rolled_back"),
        ("sqlite", _evidence, None),
        pytest.param("postgresql", _rollback, "release.rolled_back", marks=pytest.mark.slow),
    ],
)
def test_a_leader_that_dies_at_any_statement_leaves_all_or_nothing(
    watched: Watched, prepare: Any, action: str | None
) -> None:
    """Each death is followed by another server, which dies one statement later. Until one lives long enough, all is
    as it was; then all of the change is there, once, and the next leader adds nothing."""
    prepare(watched)
    before = watched.stored()
    deaths = 0
    while True:
        dying = Database(watched.plane.url)
        killer = Killer(dying, deaths)
        with contextlib.suppress(Killed, DatabaseUnavailable):
            watched.round(watched.server(f"life-{deaths}", dying, announces=True), after=0.0)
        dying.close()
        after = watched.stored()
        if after != before or killer.left > 0:
            break
        deaths += 1
        watched.end_lease()
    assert deaths > 10
    watched.end_lease()
    watched.round(watched.server("last", announces=True), after=0.0)
    found = watched.stored()
    assert found == after, "the next leader does it again"
    added = {name: rows[len(before[name]) :] for name, rows in found.items()}
    assert found["outcomes"] == []
    # A step begins without evidence; the guard of a release that has ended stays to be looked at.
    assert found["counted"] == [
        {"release.step": 0, "release.rolled_back": 60}.get(action or "", ENOUGH if action else 8)
    ]
    assert added["audit"] == ([] if action is None else [("guard", action)])
    assert len(added["revisions"]) == (action is not None)
    is_told = action in ("release.promoted", "release.rolled_back")
    assert added["deliveries"] == ([(action, 0)] if is_told else [])


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_two_servers_at_once_make_each_change_once(watched: Watched) -> None:
    watched.put(BY_TIME, v1=100, v2=0)
    databases = [Database(watched.plane.url) for _ in range(2)]
    servers = [watched.server(name, database) for name, database in zip("ab", databases, strict=True)]
    changes: list[Any] = []
    for number in range(14):
        watched.seconds += 10.0
        if number % 3 == 2:
            watched.end_lease()
        for failure in at_once(*(lambda server=server: server.round(changes.append) for server in servers)):
            assert failure is None
    assert [change.event for change in changes] == ["release_step", "release_promoted"]
    assert watched.stored()["audit"][-2:] == [("guard", "release.step"), ("guard", "release.promoted")]
    for database in databases:
        database.close()


def test_a_leader_that_stalled_changes_nothing_once_another_leads(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.put(BY_TIME, v1=100, v2=0)
    stalled, other = watched.server("a"), watched.server("b")
    watched.round(stalled)
    watched.seconds = 70.0
    renew = Rounds._renew

    def stall(self: Rounds, *, at_once: bool = False) -> None:
        renew(self, at_once=at_once)
        if self is stalled and at_once:
            watched.end_lease()
            assert leases.take(watched.plane.database, LEASE, "b", 600.0) is not None

    monkeypatch.setattr(Rounds, "_renew", stall)
    assert watched.round(stalled, after=0.0) == []
    assert stalled.term is None
    assert watched.stored()["run"][0][2] == 0
    assert [change.event for change in watched.round(other, after=0.0)] == ["release_step"]


def test_a_look_asks_no_cache_to_read_a_release_again_that_did_not_change(watched: Watched) -> None:
    watched.put(BOTH, v1=100, v2=0)
    server, database = watched.server(), watched.plane.database
    watched.round(server)
    seen = database.revision
    watched.ended(1, 8)
    watched.ended(2, 2)
    watched.round(server)
    with database.read() as session:
        assert session.scalars(select(ReleaseRun.guard_state)).one() is not None
        assert session.scalars(select(ReleaseOutcome.id)).all() == []
    assert not database.changed_since("adapter:acme/pirate", seen)


def test_rows_of_running_requests_from_a_time_to_come_are_no_evidence(watched: Watched) -> None:
    watched.put(GUARDED, v1=50, v2=50)
    server = watched.server()
    watched.seconds = 50
    watched.ended(1, 60)
    watched.round(server)
    for _ in range(12):
        watched.ended(1, 8)
        watched.running(2, [5.0] * 16, age_s=-3600.0)
        watched.round(server)
    assert watched.changes == []
    with watched.plane.database.read() as session:
        assert session.scalars(select(RunningArmRow)).all() == []


def test_a_rollback_by_hand_of_what_was_promoted_keeps_what_the_guard_saw(watched: Watched) -> None:
    _promotion(watched)
    watched.round(watched.server("after"), after=0.0)
    assert watched.weights() == {"v2": 100}
    watched.plane.releases.rollback("acme", "pirate")
    run = watched.release().run
    assert run is not None
    assert (run.status, watched.weights()) == ("rolled_back", {"v1": 100})
    assert watched.verdict().num_requests == ENOUGH
