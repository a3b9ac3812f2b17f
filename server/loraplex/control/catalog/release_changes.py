"""Writes the next revision of a release. Whatever changes a release ends what watched it, in the same transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete
from sqlalchemy.orm import Session

from loraplex.control.audit.recorder import Actor, record
from loraplex.control.catalog.release_reading import (
    current_release,
    release_info,
    release_shown,
    shadow_columns,
    with_run,
)
from loraplex.control.db.clock import database_now
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Release
from loraplex.control.release_types import (
    NO_PLAN,
    ReleaseInfo,
    ReleaseOrigin,
    ReleasePlan,
    ReleaseTarget,
    RunStatus,
    Sticky,
)
from loraplex.control.tenancy.tenants import tenant_target

MAX_REVISIONS = 100
"""Releases of a name that are kept; `rollback` goes back no further."""
MAX_REASON = 200


def add_release(
    session: Session,
    tenant_id: str,
    name: str,
    targets: Sequence[ReleaseTarget],
    sticky: Sticky,
    *,
    origin: ReleaseOrigin,
    by: Actor,
    restores: int | None = None,
    plan: ReleasePlan = NO_PLAN,
    reason: str | None = None,
) -> ReleaseInfo:
    """The next revision; no targets at all end the name's release. Unless it is a step of it, it ends the run that the
    name has: as promoted where the candidate gets all traffic, as rolled back by a rollback, else without a trace."""
    before = current_release(session, tenant_id, name)
    run = session.get(ReleaseRun, (tenant_id, name))
    row = Release(
        tenant_id=tenant_id,
        name=name,
        revision=1 if before is None else before.revision + 1,
        targets=[{"version": target.version, "weight": target.weight} for target in targets],
        sticky=sticky,
        created_at=database_now(session),
        origin=origin,
        restores=restores,
        actor=by.kind,
        actor_key_id=by.key_id,
        guard=None if plan.guard is None else dict(plan.guard),
        schedule=None if plan.schedule is None else list(plan.schedule),
        shadow=None if plan.shadow is None else shadow_columns(plan.shadow),
        reason=None if reason is None else reason[:MAX_REASON],
    )
    if run is not None and origin == "step":
        row.began = run.began
    elif run is not None:
        _end_run(session, run, row)
    session.add(row)
    session.flush()
    session.execute(
        delete(Release).where(
            Release.tenant_id == tenant_id,
            Release.name == name,
            Release.revision <= row.revision - MAX_REVISIONS,
        )
    )
    return with_run(release_info(row), session.get(ReleaseRun, (tenant_id, name)))


def _end_run(session: Session, run: ReleaseRun, row: Release) -> None:
    served = [target["version"] for target in row.targets if target["weight"]]
    status: RunStatus | None = None
    if row.origin == "rollback" and run.status != "rolled_back" and run.revision == row.revision - 1:
        status = "rolled_back"  # also of a promoted one: what its guard saw is asked for now
    elif run.status in ("running", "paused"):
        if row.origin == "rollback":
            status = "rolled_back"
        elif served == [f"v{run.candidate}"]:
            status = "promoted"
    if status is None:
        session.delete(run)
        return
    row.began = run.began
    run.revision, run.status, run.reason = row.revision, status, row.reason
    run.since = row.created_at.timestamp()  # the guard's evidence stays, to be looked at


def recorded(
    session: Session, by: Actor, action: str, before: ReleaseInfo, after: ReleaseInfo
) -> ReleaseInfo:
    """The release after a change, which is in the audit log from now on."""
    record(
        session,
        by,
        action,
        f"{tenant_target(after.tenant_id)}/adapters/{after.name}/release",
        tenant_id=after.tenant_id,
        before=release_shown(before),
        after=release_shown(after),
    )
    return after


def release_only(session: Session, tenant_id: str, name: str, version: str, *, by: Actor) -> None:
    """All traffic to `version`, which is ready, if it has not all of it already."""
    before = current_release(session, tenant_id, name)
    assert before is not None, "a name with a version has a release"
    if {target.version for target in before.targets if target.weight} == {version}:
        return
    targets = (ReleaseTarget(version, 100),)
    after = add_release(session, tenant_id, name, targets, before.sticky, origin="promote", by=by)
    recorded(session, by, "release.promote", before, after)
