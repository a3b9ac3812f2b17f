"""Releases and shadows that are under way over all tenants, and the releases that cannot be decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select, tuple_
from sqlalchemy.orm import Session, aliased

from loraplex.control.db.release_tables import ReleaseRun, ShadowCount
from loraplex.control.db.tables import Release
from loraplex.control.turns import Turns, in_turns
from loraplex.lifecycle.needs.standing import Standing, standing_of
from loraplex.lifecycle.release_guard.comparison import Unit
from loraplex.lifecycle.release_guard.guard import Guard, GuardStateInvalid, Verdict

MOST_READ = 500
"""Releases whose evidence is read: the tenants in turn, of each those whose step began first."""


@dataclass(frozen=True, slots=True)
class RunningRelease:
    """A release with a guard or a schedule that goes on by itself."""

    tenant_id: str
    name: str
    version: str
    """The new version."""
    since: datetime
    """When its step began."""
    share: float
    """The part of the traffic that it gets, from 0 to 1."""
    step: int | None
    """The step of the schedule, from 0; None without a schedule."""
    steps: int
    unit: Unit
    """The thing that draws its version by chance, and is counted."""
    standing: Standing
    verdict: Verdict | None = None
    """The guard's, of the releases that are shown."""


@dataclass(frozen=True, slots=True)
class RunningShadow:
    """A release with a shadow: `version` answers `share` of its requests too. `samples` were compared so far."""

    tenant_id: str
    name: str
    version: str
    since: datetime
    share: float
    samples: int


@dataclass(frozen=True, slots=True)
class ReleasesUnderWay:
    """`undecided` are those with an obstacle, which `running` does not have. `unread`: how many more run."""

    running: Turns[RunningRelease]
    undecided: Turns[RunningRelease]
    shadows: Turns[RunningShadow]
    unread: int


def releases_under_way(session: Session, now: datetime, limit: int) -> ReleasesUnderWay:
    """Read at most `limit` of each. Four statements at most, whatever the number of releases."""
    found, total = _running(session, now)
    stuck = in_turns((each for each in found if each.standing.obstacle), _tenant, limit)
    smooth = in_turns((each for each in found if not each.standing.obstacle), _tenant, limit)
    verdicts = _verdicts(session, [*stuck.rows, *smooth.rows])

    def told(turns: Turns[RunningRelease]) -> Turns[RunningRelease]:
        rows = [
            dataclasses.replace(each, verdict=verdicts.get((each.tenant_id, each.name)))
            for each in turns.rows
        ]
        return dataclasses.replace(turns, rows=rows)

    return ReleasesUnderWay(told(smooth), told(stuck), _shadows(session, limit), total - len(found))


def _tenant(row: RunningRelease) -> str:
    return row.tenant_id


def _running(session: Session, now: datetime) -> tuple[Sequence[RunningRelease], int]:
    """The releases that run, at most `MOST_READ`, and how many there are."""
    run, release = ReleaseRun, Release
    own = (release.tenant_id == run.tenant_id) & (release.name == run.name)
    turn = func.row_number().over(partition_by=run.tenant_id, order_by=(run.since, run.name)).label("turn")
    query = (
        select(
            run.tenant_id, run.name, run.step, run.since, run.candidate, run.course,
            release.targets, release.schedule, release.guard, release.sticky,
            func.count().over().label("total"),
            turn,
        )
        .join(release, own & (release.revision == run.revision))
        .where(run.status == "running")
        .order_by(turn, run.since)
        .limit(MOST_READ)
    )  # fmt: skip
    rows = session.execute(query).all()
    found = [_running_release(row, now.timestamp()) for row in rows]
    return found, rows[0].total if rows else 0


def _running_release(row: Any, now: float) -> RunningRelease:
    version = f"v{row.candidate}"
    whole = sum(target["weight"] for target in row.targets)
    own = sum(target["weight"] for target in row.targets if target["version"] == version)
    return RunningRelease(
        tenant_id=row.tenant_id,
        name=row.name,
        version=version,
        since=datetime.fromtimestamp(row.since, UTC),
        share=own / whole if whole else 0.0,
        step=None if row.schedule is None else row.step,
        steps=len(row.schedule or ()),
        unit="request" if row.sticky == "none" else row.sticky,
        standing=standing_of(
            step=row.step,
            since=row.since,
            schedule=row.schedule,
            has_guard=row.guard is not None,
            course=row.course,
            now=now,
        ),
    )


def _verdicts(session: Session, shown: Sequence[RunningRelease]) -> dict[tuple[str, str], Verdict]:
    """The verdicts of the guards of these releases, as far as they can be read."""
    run = ReleaseRun
    names = [(each.tenant_id, each.name) for each in shown]
    if not names:
        return {}
    query = select(run.tenant_id, run.name, run.since, run.guard_state).where(
        tuple_(run.tenant_id, run.name).in_(names), run.guard_state.is_not(None)
    )
    found: dict[tuple[str, str], Verdict] = {}
    for tenant, name, since, state in session.execute(query):
        try:
            guard = Guard.from_json(state or b"")
        except GuardStateInvalid:  # of another version of Loraplex; the leader begins the step again
            continue
        if guard.since == since:
            found[tenant, name] = guard.verdict()
    return found


def _shadows(session: Session, limit: int) -> Turns[RunningShadow]:
    release, later = Release, aliased(Release)
    newer = select(later.revision).where(
        later.tenant_id == release.tenant_id,
        later.name == release.name,
        later.revision > release.revision,
    )
    query = select(
        release.tenant_id, release.name, release.revision, release.began, release.created_at, release.shadow
    ).where(release.shadow.is_not(None), ~newer.exists())
    rows = session.execute(query.order_by(release.created_at, release.name)).all()
    turns = in_turns(rows, lambda row: str(row.tenant_id), limit)
    began = {
        (row.tenant_id, row.name): row.revision if row.began is None else row.began for row in turns.rows
    }
    counts: dict[tuple[str, str], int] = {}
    if began:
        of = ShadowCount
        query_counts = select(of.tenant_id, of.name, of.samples).where(
            tuple_(of.tenant_id, of.name, of.began).in_([(*key, first) for key, first in began.items()])
        )
        for tenant, name, samples in session.execute(query_counts):
            counts[tenant, name] = counts.get((tenant, name), 0) + samples
    shown = [
        RunningShadow(
            tenant_id=row.tenant_id,
            name=row.name,
            version=row.shadow["version"],
            since=row.created_at,
            share=row.shadow["sample"],
            samples=counts.get((row.tenant_id, row.name), 0),
        )
        for row in turns.rows
    ]
    return Turns(shown, turns.total, turns.more)
