"""One look at one release: new evidence in, at most one change out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from loraplex.control.catalog.release_reading import require_release, version_states
from loraplex.control.catalog.release_runs import roll_back, state_of, take_step
from loraplex.control.catalog.schedule_state import ScheduleState
from loraplex.control.db.release_tables import ReleaseRun, RunningArmRow
from loraplex.control.release_types import ReleaseInfo
from loraplex.control.usage.outcome_inbox import read_outcomes, remove_outcomes
from loraplex.lifecycle.release_guard.comparison import Unit
from loraplex.lifecycle.release_guard.course import Course, Point
from loraplex.lifecycle.release_guard.groups import Arms
from loraplex.lifecycle.release_guard.guard import Guard, Verdict
from loraplex.lifecycle.release_guard.rules import MetricName, parse_rules
from loraplex.lifecycle.release_guard.schedule import advance, guard_of, parse_schedule
from loraplex.lifecycle.release_guard.window import RunningArm

MAX_OUTCOMES = 2000
"""Outcomes that one look counts; the next one takes the next."""
FRESH_S = 5.0
"""Age from which a server's row of running requests says nothing: it may have ended. Nor does one that is as far ahead
of the clock, which went back."""
KEPT_S = 60.0
NOTED_S = 60.0
"""Time after which a look is noted that found nothing new: its absence tells that looks have stopped."""
RollbackCause = MetricName | Literal["unusable"]
"""A metric, or a candidate that cannot serve."""
_GO_ON = Verdict("pass", 0.0, 1.0, 0)


@dataclass(frozen=True, slots=True)
class Change:
    """The change that a look made. `cause` is of a rollback."""

    event: Literal["release_step", "release_promoted", "release_rolled_back"]
    release: ReleaseInfo
    cause: RollbackCause | None = None


def look(session: Session, run: ReleaseRun, now: float) -> Change | None:
    """Count the outcomes and running requests since the last look, and make the change that the guard or the schedule
    asks for. `now` is in seconds since the epoch. All of it is in the caller's transaction, which has checked that it
    leads; None where the release stays as it is."""
    release = require_release(session, run.tenant_id, run.name)
    broken = _unusable(session, run)
    if broken is not None:
        return _rolled_back(session, run, broken, "unusable")
    if run.status != "running":
        return None
    outcomes = read_outcomes(session, run.tenant_id, run.name, MAX_OUTCOMES)
    guard, verdict = _guard(release, run), _GO_ON
    if guard is not None:
        running = _running(session, run, now)
        verdict = guard.observe(outcomes.values(), running, now)
    if outcomes:
        remove_outcomes(session, outcomes)
    if guard is not None:
        _keep(session, run, guard, now)
    before = state_of(run)
    after = _advanced(release, before, verdict, now)
    if after.status == "rolled_back":
        metric = None if verdict.breach is None else verdict.breach.metric
        return _rolled_back(session, run, after.reason or "guard", metric or "unusable")
    if after != before:
        taken = take_step(session, run, after)
        return Change("release_promoted" if after.status == "promoted" else "release_step", taken)
    return None


def _advanced(release: ReleaseInfo, state: ScheduleState, verdict: Verdict, now: float) -> ScheduleState:
    if release.plan.schedule is not None:
        return advance(parse_schedule(list(release.plan.schedule)), state, verdict, now)
    if verdict.kind != "breach":
        return state
    return ScheduleState(state.step, now, "rolled_back", verdict.reason)


def _guard(release: ReleaseInfo, run: ReleaseRun) -> Guard | None:
    if release.plan.guard is None:
        return None
    weights = {target.version: float(target.weight) for target in release.targets}
    unit: Unit = "request" if release.sticky == "none" else release.sticky
    arms = Arms(run.control, run.candidate, weights[f"v{run.control}"], weights[f"v{run.candidate}"], unit)
    return guard_of(
        parse_rules(dict(release.plan.guard)),
        arms,
        since=run.since,
        num_steps=len(release.plan.schedule or ()),
        persisted=run.guard_state,
    )


def _unusable(session: Session, run: ReleaseRun) -> str | None:
    """Why the candidate cannot stay; None if it can, or if the control could not serve either."""
    states = version_states(session, run.tenant_id, run.name)
    candidate, control = f"v{run.candidate}", f"v{run.control}"
    state = states.get(candidate, "deleted")
    return f"{candidate} is {state}" if state != "ready" and states.get(control) == "ready" else None


def _rolled_back(session: Session, run: ReleaseRun, reason: str, cause: RollbackCause) -> Change:
    return Change("release_rolled_back", roll_back(session, run, reason), cause)


def _keep(session: Session, run: ReleaseRun, guard: Guard, now: float) -> None:
    state, course = guard.to_json(), Course.from_json(run.course)
    noted = course.last_look(run.step, guard.since)
    if state == run.guard_state and noted is not None and 0 <= now - noted < NOTED_S:
        return
    verdict = guard.verdict()
    point = Point(now, verdict.e_value, verdict.threshold, verdict.num_requests, guard.needs)
    course.add(run.step, guard.since, point)
    # Not by the row itself: no cache holds the evidence, and none has to be read again for it.
    of = (ReleaseRun.tenant_id == run.tenant_id, ReleaseRun.name == run.name)
    values = {"course": course.to_json()} | ({} if state == run.guard_state else {"guard_state": state})
    session.execute(update(ReleaseRun).where(*of).values(**values))


def _running(session: Session, run: ReleaseRun, now: float) -> Sequence[RunningArm]:
    of = RunningArmRow
    query = select(of).where(
        of.tenant_id == run.tenant_id,
        of.name == run.name,
        of.at > _moment(now - FRESH_S),
        of.at < _moment(now + FRESH_S),
    )
    return [
        RunningArm(row.version, row.count, tuple((key_hash, began) for key_hash, began in row.oldest))
        for row in session.scalars(query)
    ]


def remove_old_rows(session: Session, now: float) -> None:
    """Remove the rows of servers that do not write theirs any more."""
    at = RunningArmRow.at
    session.execute(delete(RunningArmRow).where((at < _moment(now - KEPT_S)) | (at > _moment(now + KEPT_S))))


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
