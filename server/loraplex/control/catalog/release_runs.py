"""Releases that are watched: how one begins, what its steps write, and how it ends. Each function is one change within
the caller's transaction, with its revision and its audit row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.control.audit.recorder import GUARD, Actor
from loraplex.control.catalog import schedule_state
from loraplex.control.catalog.release_changes import add_release, recorded
from loraplex.control.catalog.release_reading import (
    current_release,
    kept_revisions,
    last_without,
    require_release,
    version_states,
    with_run,
)
from loraplex.control.catalog.schedule_state import ScheduleState
from loraplex.control.catalog.versions import version_number
from loraplex.control.db.clock import database_now
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Release
from loraplex.control.errors import Conflict, InvalidValue
from loraplex.control.release_types import (
    MAX_RELEASE_WEIGHT,
    ReleaseInfo,
    ReleasePlan,
    ReleaseTarget,
    RunStatus,
)

ALL = 100
"""Percent of the traffic."""
MAX_RUNS = 256
"""Releases of a tenant that are watched at a time: one server looks at each of them every second."""


def running(session: Session) -> list[ReleaseRun]:
    """The releases of all tenants that are guarded or go on by themselves now; those that are paused are not."""
    return list(session.scalars(select(ReleaseRun).where(ReleaseRun.status == "running")))


def state_of(run: ReleaseRun) -> ScheduleState:
    return ScheduleState(run.step, run.since, cast(RunStatus, run.status), run.reason)


def planned_targets(
    session: Session, before: ReleaseInfo, targets: Sequence[ReleaseTarget], plan: ReleasePlan
) -> tuple[ReleaseTarget, ...]:
    """The targets with the weights that the plan's first step gives them. `targets` are ready. Raises InvalidValue for
    a plan that they do not allow, Conflict where a schedule has not ended."""
    _check_shadow(session, before, targets, plan)
    if plan.guard is None and plan.schedule is None:
        return tuple(targets)
    what = "a guard" if plan.schedule is None else "a schedule"
    if len(targets) < 2:
        raise InvalidValue(
            f"'targets' needs two versions for {what}: the newest, and the one that it replaces.",
            param="targets",
        )
    _check_room(session, before)
    candidate = newest(targets)
    if not any(target.weight for target in targets if target != candidate):
        raise InvalidValue(
            f"'targets' gives nothing to versions before {candidate.version}: {what} needs one of them with a weight "
            "above 0.",
            param="targets",
        )
    if plan.schedule is None:
        if not candidate.weight:
            raise InvalidValue(
                f"'targets' gives nothing to {candidate.version}, the newest: without traffic a guard learns nothing. "
                "Give it a weight above 0, or a schedule.",
                param="targets",
            )
        return tuple(targets)
    if before.run is not None and before.plan.schedule is not None:
        run = before.run
        schedule_state.begin(0.0, ScheduleState(run.step, run.since, run.status))
    return step_targets(targets, plan.schedule[0]["weight"])


def _check_room(session: Session, before: ReleaseInfo) -> None:
    of = ReleaseRun
    others = (of.tenant_id == before.tenant_id, of.name != before.name, of.status.in_(("running", "paused")))
    if (session.scalar(select(func.count()).select_from(of).where(*others)) or 0) >= MAX_RUNS:
        raise Conflict(
            f"The tenant has {MAX_RUNS} releases with a guard or a schedule that have not ended, the most that it may "
            "have: promote or roll back one of them first."
        )


def _check_shadow(
    session: Session, before: ReleaseInfo, targets: Sequence[ReleaseTarget], plan: ReleasePlan
) -> None:
    shadow = plan.shadow
    if shadow is None:
        return
    if not 0 < shadow.sample <= 1:
        raise InvalidValue("'shadow.sample' is a share above 0, up to 1.", param="shadow.sample")
    states = version_states(session, before.tenant_id, before.name)
    ready = sorted((version for version, state in states.items() if state == "ready"), key=version_number)
    if shadow.version not in ready:
        raise InvalidValue(
            f"'{before.name}' has no version {shadow.version[:40]} that is ready; ready: {', '.join(ready) or 'none'}.",
            param="shadow.version",
        )
    given = {target.version for target in targets if target.weight}
    if plan.schedule is not None:
        given.add(newest(targets).version)
    if shadow.version in given:
        raise InvalidValue(
            f"'shadow.version' is {shadow.version}, which 'targets' gives traffic already: a shadow is another one.",
            param="shadow.version",
        )


def newest(targets: Sequence[ReleaseTarget]) -> ReleaseTarget:
    """The target with the highest version."""
    return max(targets, key=lambda target: version_number(target.version))


def step_targets(targets: Sequence[ReleaseTarget], percent: int) -> tuple[ReleaseTarget, ...]:
    """The newest version gets `percent` of the traffic, and the others share the rest as they did. The weights add up
    to 100, or to a multiple of it where whole numbers need that."""
    candidate = newest(targets)
    others = [target.weight * (ALL - percent) for target in targets if target != candidate]
    whole = sum(target.weight for target in targets if target != candidate)
    common = math.gcd(whole, *others)
    shrink = max(1.0, max(*others, whole * percent) / common / MAX_RELEASE_WEIGHT)

    def weight(target: ReleaseTarget) -> int:
        share = whole * percent if target == candidate else target.weight * (ALL - percent)
        return max(1, int(share // common / shrink)) if share else 0

    return tuple(ReleaseTarget(target.version, weight(target)) for target in targets)


def begin_run(session: Session, release: ReleaseInfo) -> ReleaseInfo:
    """Watch the release, which has just been put with a guard or a schedule."""
    row = session.get(Release, (release.tenant_id, release.name, release.revision))
    assert row is not None
    candidate = newest(release.targets)
    control = max(
        (target for target in release.targets if target != candidate),
        key=lambda target: (target.weight, version_number(target.version)),
    )
    row.began = release.revision
    run = session.get(ReleaseRun, (release.tenant_id, release.name))
    if run is None:
        run = ReleaseRun(tenant_id=release.tenant_id, name=release.name)
        session.add(run)
    run.began = run.revision = release.revision
    run.status, run.step, run.since = "running", 0, release.created_at.timestamp()
    run.control, run.candidate = version_number(control.version), version_number(candidate.version)
    run.reason = run.guard_state = run.course = None
    session.flush()
    after = current_release(session, release.tenant_id, release.name)
    assert after is not None
    return after


def pause_run(session: Session, release: ReleaseInfo, *, by: Actor) -> ReleaseInfo:
    """Raises Conflict where the release is not running."""
    run = _run_of(session, release)
    _keep(run, schedule_state.pause(state_of(run), database_now(session).timestamp()))
    return recorded(session, by, "release.pause", release, with_run(release, run))


def resume_run(session: Session, release: ReleaseInfo, *, by: Actor) -> ReleaseInfo:
    """Raises Conflict where the release is not paused."""
    run = _run_of(session, release)
    run.guard_state = None
    _keep(run, schedule_state.resume(state_of(run), database_now(session).timestamp()))
    return recorded(session, by, "release.resume", release, with_run(release, run))


def _run_of(session: Session, release: ReleaseInfo) -> ReleaseRun:
    run = None if release.run is None else session.get(ReleaseRun, (release.tenant_id, release.name))
    if run is None:
        raise Conflict(f"Nothing watches the release of '{release.name}': it has no guard and no schedule.")
    return run


def _keep(run: ReleaseRun, state: ScheduleState) -> None:
    run.step, run.since, run.status = state.step, state.since, state.status


def take_step(session: Session, run: ReleaseRun, state: ScheduleState) -> ReleaseInfo:
    """The step of the schedule that `state` is in, from now on; after the last one all traffic goes to the
    candidate."""
    before = require_release(session, run.tenant_id, run.name)
    steps = before.plan.schedule
    assert steps is not None, "only a schedule has steps"
    is_last = state.step >= len(steps)
    targets = (
        (ReleaseTarget(f"v{run.candidate}", ALL),)
        if is_last
        else step_targets(before.targets, steps[state.step]["weight"])
    )
    plan = ReleasePlan() if is_last else before.plan
    after = add_release(
        session, run.tenant_id, run.name, targets, before.sticky, origin="step", plan=plan, by=GUARD
    )
    run.revision = after.revision
    if not is_last:
        run.guard_state = None  # each step has its own; that of the last one stays to be looked at
    _keep(run, state)
    session.flush()
    action = "release.promoted" if is_last else "release.step"
    return recorded(session, GUARD, action, before, with_run(after, run))


def roll_back(session: Session, run: ReleaseRun, reason: str) -> ReleaseInfo:
    """Put the release in force that was before this one began, or the last before it that can be and gives the
    candidate no traffic; without one, all traffic goes to the control."""
    before = require_release(session, run.tenant_id, run.name)
    kept = kept_revisions(session, run.tenant_id, run.name)
    states = version_states(session, run.tenant_id, run.name)
    earlier = last_without(f"v{run.candidate}", before, kept, states)
    after = add_release(
        session,
        run.tenant_id,
        run.name,
        (ReleaseTarget(f"v{run.control}", ALL),) if earlier is None else earlier.targets,
        before.sticky if earlier is None else earlier.sticky,
        origin="rollback",
        restores=None if earlier is None else earlier.restores or earlier.revision,
        reason=reason,
        by=GUARD,
    )
    return recorded(session, GUARD, "release.rolled_back", before, after)
