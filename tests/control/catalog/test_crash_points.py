"""Every step of an upload and of a deletion, as a point at which the process dies or the disk fails.

The list of steps is `loraplex.adapters.store.fault_points.FaultPoint`. Each act runs in a process of its own over
real files and a real SQLite database, through the admin plane, once for each of its steps.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from loraplex.adapters.store.fault_points import BUCKET_POINTS, FaultPoint
from loraplex.control.db.tables import LIVING, AdapterVersion
from support.faults.crash import COMMITTED, OPENING, SCENARIOS, CrashHost, Point, Run, Scenario, prepared
from support.faults.witness import KINDS, Seen, unannounced
from support.http.admin_plane import AdminPlane

UPLOADS = [name for name, row in SCENARIOS.items() if row.is_upload]
COMMON = frozenset(
    {
        FaultPoint.STAGE,
        FaultPoint.RECEIVE_CREATE,
        FaultPoint.RECEIVE_WRITE,
        FaultPoint.FLUSH_STAGED,
        FaultPoint.FLUSH_FILE,
    }
)
"""Steps of every upload, which the short version takes one by one for a first upload alone."""


SHORT = ("first", "archive", "push", "lost", "heal", "delete", "accept", "reject shared", "start")


def short_and_long(names: Iterable[str]) -> list[Any]:
    """Each with whether all its steps are wanted. The short version has an act of each kind."""
    short = [pytest.param(name, False, marks=pytest.mark.slow) for name in names if name in SHORT]
    return [*short, *(pytest.param(name, True, marks=pytest.mark.soak) for name in names)]


def steps(name: str, points: list[Point], every: bool) -> Iterator[tuple[int, Point]]:
    for index, point in enumerate(points):
        if every or name == "first" or (index >= OPENING and point.step not in COMMON):
            yield index, point


@dataclass
class Bench:
    """Prepared data directories, each made once and copied for each run."""

    root: Path
    host: CrashHost
    num_runs: int = 0
    first_versions: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    undisturbed: dict[str, list[Point]] = field(default_factory=dict)

    def fresh(self, name: str) -> Path:
        template = self.root / f"template {name}"
        if not template.exists():
            prepared(SCENARIOS[name], template)
        self.num_runs += 1
        return Path(shutil.copytree(template, self.root / f"run {self.num_runs}"))

    def versions_before(self, name: str) -> dict[str, tuple[str, str]]:
        """Those of every fresh data directory of this name."""
        if name not in self.first_versions:
            plane = AdminPlane(self.fresh(name))
            self.first_versions[name] = versions(plane)
            plane.close()
        return self.first_versions[name]

    def points(self, name: str) -> list[Point]:
        """The steps of the act where nothing fails."""
        if name not in self.undisturbed:
            run = self.host.run(name, self.fresh(name))
            assert run.status == 0
            self.undisturbed[name] = run.points
        return self.undisturbed[name]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """In memory where there is a file system of it: a killed process leaves the same there, and a flush is free."""
    memory = Path("/dev/shm")
    root = tempfile.TemporaryDirectory(
        prefix="loraplex-crash-", dir=memory if os.access(memory, os.W_OK) else None
    )
    with root, CrashHost() as host:
        yield Bench(Path(root.name), host)


def versions(plane: AdminPlane) -> dict[str, tuple[str, str]]:
    """Living versions: TENANT/NAME@vN → digest and state."""
    with plane.database.read() as session:
        rows = session.scalars(select(AdapterVersion).where(LIVING))
        return {f"{row.tenant_id}/{row.name}@v{row.number}": (row.digest, row.state) for row in rows}


def check_what_was_there(scenario: Scenario, before: dict[str, tuple[str, str]], plane: AdminPlane) -> None:
    """Nothing that had been answered for is lost or changed; what should go may be gone."""
    after = versions(plane)
    for name, (digest, state) in before.items():
        if name not in scenario.may_go:
            assert after[name][0] == digest, name
            assert after[name][1] in {state, "ready"}, name
    assert {name for name in after if after[name][1] == "corrupt"} <= {"acme/pirate@v1"}


def check_again(scenario: Scenario, plane: AdminPlane) -> None:
    """The same act succeeds, and disk and database agree."""
    assert set(scenario.act(plane)) <= ({200, 201} if scenario.is_upload else {200, 204, 404})
    plane.check_integrity()
    assert plane.validation.pending() == []
    if scenario.is_upload:
        assert "acme/pirate@v1" in versions(plane)
        assert all(state == "ready" for _, state in versions(plane).values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), short_and_long(SCENARIOS))
def test_a_death_at_any_step_loses_nothing_and_leaves_nothing(bench: Bench, name: str, every: bool) -> None:
    scenario = SCENARIOS[name]
    num_deaths = 0
    for index, point in steps(name, bench.points(name), every):
        root, before = bench.fresh(name), bench.versions_before(name)
        run = bench.host.run(name, root, kill_at=index)
        assert run.status == -signal.SIGKILL, point.name

        plane = AdminPlane(root)
        plane.start()
        try:
            if name != "mark":  # what nobody has found yet is not known to the database
                plane.check_integrity()
            check_what_was_there(scenario, before, plane)
            if point.step is FaultPoint.VERSION_COMMITTED:
                assert len(versions(plane)) == len(before) + (name not in ("again", "heal"))
            check_again(scenario, plane)
        except AssertionError as error:
            raise AssertionError(f"killed at step {index}, {point.name}: {error}") from error
        finally:
            plane.close()
        shutil.rmtree(root)
        num_deaths += 1
    print(f"{name}: {num_deaths} deaths")


def expected(scenario: Scenario, step: FaultPoint, code: int) -> set[int]:
    """The answers when this step fails."""
    if step in (FaultPoint.DISCARD, FaultPoint.PURGE):
        return {200, 201, 204}  # what cannot be removed is swept at the next start, and hides no success
    if not scenario.is_upload and step in (FaultPoint.RETIRE, FaultPoint.FLUSH_RETIRED):
        return {200, 204}
    if step is FaultPoint.COMMIT_CHECK:
        return {503}  # the version is stored, and is checked again later
    return {507} if code in (errno.ENOSPC, errno.EDQUOT) else {503}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "every", "code"),
    [
        *(
            pytest.param(*row.values, errno.ENOSPC, marks=row.marks)
            for row in short_and_long(["first", "heal", "delete"])
        ),
        *(
            pytest.param(name, True, errno.ENOSPC, marks=pytest.mark.soak)
            for name in ("archive", "second", "again", "shared")
        ),
        pytest.param("first", False, errno.EIO, marks=pytest.mark.slow),
        *(pytest.param(name, True, errno.EIO, marks=pytest.mark.soak) for name in [*UPLOADS, "delete"]),
    ],
)
def test_a_disk_that_is_full_or_fails_at_any_step(bench: Bench, name: str, every: bool, code: int) -> None:
    """507 where it is full, 503 where it fails; nothing stays behind, and the next upload is taken."""
    scenario = SCENARIOS[name]
    answers: list[int] = []
    for index, point in steps(name, bench.points(name), every):
        if index < OPENING or point.step in COMMITTED:
            continue
        root, before = bench.fresh(name), bench.versions_before(name)
        run = bench.host.run(name, root, fail_at=index, code=code)

        plane = AdminPlane(root)
        try:
            assert run.status == 0
            assert set(run.statuses) <= expected(scenario, point.step, code)
            database_is_gone = code == errno.EIO and point.step is FaultPoint.COMMIT_VERSION
            if (
                point.step in (FaultPoint.DISCARD, FaultPoint.PURGE, FaultPoint.RETIRE)
                or database_is_gone
                or name == "heal"
            ):
                plane.start()  # what could not be removed goes now, and good bytes are found good
            plane.check_integrity()
            check_what_was_there(scenario, before, plane)
            if point.step is FaultPoint.COMMIT_CHECK:
                states = {name: row[1] for name, row in versions(plane).items()}
                checked = {name for name in states if name not in before or before[name][1] == "validating"}
                assert [states[name] for name in checked] == ["validating"]
            elif scenario.is_upload and run.statuses[0] >= 500:
                assert set(versions(plane)) == set(before)
            check_again(scenario, plane)
            answers += run.statuses
        except AssertionError as error:
            raise AssertionError(f"failed at step {index}, {point.name}: {error}") from error
        finally:
            plane.close()
        shutil.rmtree(root)
    print(f"{name}, {errno.errorcode[code]}: {len(answers)} failures, {dict(Counter(answers))}")


@pytest.fixture(scope="module")
def watched(bench: Bench) -> dict[str, Run]:
    """Each act, watched."""
    runs = {name: bench.host.run(name, bench.fresh(name), watch=True) for name in SCENARIOS}
    assert {run.status for run in runs.values()} == {0}
    return runs


def test_no_change_of_a_file_or_a_row_goes_unannounced(watched: dict[str, Run]) -> None:
    for name, run in watched.items():
        assert unannounced(run.seen) == [], name
        assert sum(not seen.announced for seen in run.seen) >= 4 - (name == "mark") - (
            name == "delete shared"
        ), name


def test_every_step_is_taken_by_some_act_and_would_be_missed(watched: dict[str, Run]) -> None:
    """The check above is not blind: without any one step's announcement, something is found."""
    taken = {FaultPoint(seen.what) for run in watched.values() for seen in run.seen if seen.announced}
    # Those of a bucket are watched by tests/adapters/store/test_bucket_store.py.
    assert taken == set(FaultPoint) - BUCKET_POINTS - {FaultPoint.MAKE_STORE}
    for step in taken - COMMITTED:
        blind: list[Seen] = []
        for run in watched.values():
            blind += unannounced([seen for seen in run.seen if seen.what != step])
        assert blind, step
    assert frozenset().union(*KINDS.values()) == set(FaultPoint) - COMMITTED - BUCKET_POINTS
