"""Outcomes for the guard: each ended request of a release that is run comes in once, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.control.db.database import Database
from loraplex.control.usage.outcome import Outcome
from loraplex.control.usage.outcome_inbox import read_outcomes, remove_outcomes, remove_unwatched
from loraplex.control.usage.records import Accepted, Ended
from support.control.plane import ControlPlane
from support.control.runs import begin_run, end_run
from support.control.usage import AT, ended
from support.control.usage_lives import Flaky, Life

ARM: dict[str, Any] = {"adapter": "support", "version": 2, "key_hash": 2**64 - 5}


def inbox(database: Database, tenant: str = "acme", name: str = "support") -> dict[str, Outcome]:
    with database.read() as session:
        return read_outcomes(session, tenant, name, 10_000)


def outcomes_of(rows: list[Ended]) -> dict[str, Outcome]:
    return {row.id: Outcome.of(row) for row in rows}


def test_requests_that_a_running_release_sent_to_its_arms_come_in(
    plane: ControlPlane, tmp_path: Path
) -> None:
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    begin_run(plane.database, "acme", "paused", control=1, candidate=2)
    end_run(plane.database, "acme", "paused", status="paused")
    life = Life(tmp_path / "usage", plane.database)
    rows = life.serve(2, **ARM) + life.serve(1, **ARM | {"version": 1, "key_hash": 1})
    for others in (
        {"version": 3},  # no arm of it
        {"key_hash": 0},  # the request named the version
        {"adapter": "paused"},
        {"adapter": "unwatched"},
        {"tenant_id": "rival"},
    ):
        life.serve(1, **ARM | others)
    life.write()
    assert inbox(plane.database) == outcomes_of(rows)
    assert inbox(plane.database, name="paused") == inbox(plane.database, "rival") == {}
    life.stop()


def test_the_first_to_end_are_read_first_and_removed_by_id(plane: ControlPlane, tmp_path: Path) -> None:
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    life = Life(tmp_path / "usage", plane.database)
    late = life.serve(2, **ARM, at=AT + timedelta(seconds=1))
    early = life.serve(2, **ARM)
    life.write()
    with plane.database.write() as session:
        first = read_outcomes(session, "acme", "support", 2)
        remove_outcomes(session, first)
    assert first == outcomes_of(early)
    assert inbox(plane.database) == outcomes_of(late)
    life.stop()


def test_outcomes_of_a_release_that_has_ended_are_removed(plane: ControlPlane, tmp_path: Path) -> None:
    life = Life(tmp_path / "usage", plane.database)
    for name in ("support", "other"):
        begin_run(plane.database, "acme", name, control=1, candidate=2)
        life.serve(2, **ARM | {"adapter": name})
    life.write()
    end_run(plane.database, "acme", "other", status="promoted")
    with plane.database.write() as session:
        remove_unwatched(session)
    assert (len(inbox(plane.database)), inbox(plane.database, name="other")) == (2, {})
    life.stop()


def test_batches_without_such_requests_ask_nothing(
    plane: ControlPlane, tmp_path: Path, statements: list[str]
) -> None:
    life = Life(tmp_path / "usage", plane.database)
    life.serve(3, adapter="support", version=2)
    life.write()
    assert [text for text in statements if "release" in text] == []
    life.serve(3, **ARM)
    life.write()
    assert len([text for text in statements if "release_runs" in text]) == 1
    life.stop()


class _Server:
    """Lives of one server, one after the other, and a guard that counts what comes in."""

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self._flaky = Flaky(plane.database)
        self._plane = plane
        self._directory = directory
        self._life = Life(directory, self._flaky)
        self._running: list[Accepted] = []
        self.ended: list[Ended] = []
        self.cut: list[Accepted] = []
        self.counted: Counter[str] = Counter()

    def begin(self) -> None:
        self._running.append(self._life.begin(**ARM))

    def end(self) -> None:
        if self._running:
            row = ended(self._running.pop())
            asyncio.run(self._life.journal.end(row))
            self.ended.append(row)

    def serve(self) -> None:
        self.ended += self._life.serve(3, **ARM)
        self._life.serve(1)

    def write(self, *failures: str) -> None:
        self._flaky.failures = list(failures)
        self._life.try_to_write()
        self._flaky.failures = []

    def count(self) -> None:
        with self._plane.database.write() as session:
            found = read_outcomes(session, "acme", "support", 4)
            remove_outcomes(session, found)
        self.counted += Counter(found.keys())

    def die(self) -> None:
        self._life.die()
        self.cut += self._running
        self._running = []
        self._life = Life(self._directory, self._flaky)

    def stop(self) -> None:
        self.die()
        self._life.write()
        self._life.stop()
        while inbox(self._plane.database):
            self.count()


ACTS = st.sampled_from(
    [
        ("begin",),
        ("end",),
        ("serve",),
        ("write",),
        ("write", "away"),
        ("write", "broken"),
        ("write", "unheard"),
        ("count",),
        ("die",),
    ]
)


def test_an_outcome_that_was_counted_does_not_come_again(plane: ControlPlane, tmp_path: Path) -> None:
    """The database had committed when its answer was lost, and the guard is faster than the next try."""
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    server = _Server(plane, tmp_path / "usage")
    server.serve()
    server.write("unheard")
    server.count()
    server.serve()
    server.write()
    server.stop()
    check(server)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(acts=st.lists(ACTS, max_size=25))
def test_every_request_is_counted_once(
    plane: ControlPlane, tmp_path: Path, acts: list[tuple[str, ...]]
) -> None:
    begin_run(plane.database, "acme", "support", control=1, candidate=2)
    server = _Server(plane, tmp_path / "usage")
    for act, *failures in acts:
        getattr(server, act)(*failures)
    server.stop()
    check(server)


def check(server: _Server) -> None:
    assert server.counted == Counter(row.id for row in [*server.ended, *server.cut])
