"""Reads releases: the one in force of a name, and those that a rollback may restore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import AdapterVersion, Release
from loraplex.control.errors import Conflict, InvalidValue, ReleaseNotFound
from loraplex.control.release_types import (
    ActorKind,
    ReleaseInfo,
    ReleaseOrigin,
    ReleasePlan,
    ReleaseTarget,
    RunInfo,
    RunStatus,
    ShadowPlan,
    SkippedRevision,
    Sticky,
)
from loraplex.control.tenancy.tenants import require_tenant


def current_release(session: Session, tenant_id: str, name: str) -> ReleaseInfo | None:
    """The release in force; one without targets where the name's last version was deleted."""
    query = select(Release).where(Release.tenant_id == tenant_id, Release.name == name)
    row = session.scalars(query.order_by(Release.revision.desc()).limit(1)).first()
    if row is None:
        return None
    run = None if row.began is None else session.get(ReleaseRun, (tenant_id, name))
    return with_run(release_info(row), run)


def current_releases(session: Session, tenant_id: str) -> dict[str, ReleaseInfo]:
    """The releases in force of all the tenant's names."""
    newest = (
        select(Release.name, func.max(Release.revision).label("revision"))
        .where(Release.tenant_id == tenant_id)
        .group_by(Release.name)
        .subquery()
    )
    query = select(Release).join(
        newest, (Release.name == newest.c.name) & (Release.revision == newest.c.revision)
    )
    rows = session.scalars(query.where(Release.tenant_id == tenant_id))
    return {row.name: release_info(row) for row in rows}


def require_release(session: Session, tenant_id: str, name: str) -> ReleaseInfo:
    """The release in force. Raises TenantNotFound, ReleaseNotFound."""
    require_tenant(session, tenant_id)
    release = current_release(session, tenant_id, name)
    if release is None or not release.targets:
        raise ReleaseNotFound(f"The tenant '{tenant_id}' has no adapter '{name[:80]}' that is released.")
    return release


def kept_revisions(session: Session, tenant_id: str, name: str) -> dict[int, ReleaseInfo]:
    """The revisions of a name that are kept, by number."""
    query = select(Release).where(Release.tenant_id == tenant_id, Release.name == name)
    return {row.revision: release_info(row) for row in session.scalars(query)}


def version_states(session: Session, tenant_id: str, name: str) -> dict[str, str]:
    """States of a name's versions, by "v1", "v2", …"""
    query = select(AdapterVersion.number, AdapterVersion.state).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name
    )
    return {f"v{number}": state for number, state in session.execute(query)}


def one_step_back(
    release: ReleaseInfo, kept: dict[int, ReleaseInfo], states: dict[str, str]
) -> tuple[ReleaseInfo, tuple[SkippedRevision, ...]]:
    """The release that was in force before this one, and those that were passed over by name. Raises Conflict."""
    skipped: list[SkippedRevision] = []
    for earlier in _before(release, kept):
        reason = _unusable(earlier, states)
        if reason is not None:
            skipped.append(SkippedRevision(earlier.revision, reason))
        elif (earlier.targets, earlier.sticky) != (release.targets, release.sticky):
            return earlier, tuple(skipped)
    passed = "; ".join(f"revision {skip.revision}: {skip.reason}" for skip in skipped[:5])
    raise Conflict(
        f"'{release.name}' has no earlier release to go back to." + (f" Skipped: {passed}." if passed else "")
    )


def last_without(
    version: str, release: ReleaseInfo, kept: dict[int, ReleaseInfo], states: dict[str, str]
) -> ReleaseInfo | None:
    """The newest release before this one that can be in force and gives the version no traffic."""
    for earlier in _before(release, kept):
        gives = any(target.version == version and target.weight for target in earlier.targets)
        if not gives and _unusable(earlier, states) is None:
            return earlier
    return None


def to_revision(
    release: ReleaseInfo, to: int, kept: dict[int, ReleaseInfo], states: dict[str, str]
) -> ReleaseInfo:
    """Revision `to`. Raises Conflict where it cannot be restored, InvalidValue where it is not kept."""
    if to == release.revision:
        raise Conflict(f"Revision {to} of '{release.name}' is in force.", param="to")
    if to not in kept:
        raise InvalidValue(
            f"'{release.name}' has no revision {to}; kept are {min(kept)} to {max(kept)}.", param="to"
        )
    earlier = kept[to]
    reason = _unusable(earlier, states) if earlier.targets else "it released nothing"
    if reason is not None:
        raise Conflict(f"Revision {to} of '{release.name}' cannot be restored: {reason}.", param="to")
    return earlier


def _before(release: ReleaseInfo, kept: dict[int, ReleaseInfo]) -> Iterator[ReleaseInfo]:
    """Releases in force before `release`, newest first. A release that a rollback restored has its place in history
    where it was first in force, so that rollbacks do not go in circles. The steps of a schedule are passed over: each
    was on the way to the next."""
    origin = release.restores or release.revision
    while (
        earlier := kept.get(origin - 1)
    ) is not None and earlier.targets:  # none: the name was deleted then
        if earlier.plan.schedule is None:
            yield earlier
        origin = earlier.restores or earlier.revision


def _unusable(release: ReleaseInfo, states: dict[str, str]) -> str | None:
    """Why it cannot be in force, if it cannot."""
    found = {target.version: states.get(target.version, "deleted") for target in release.targets}
    unready = [f"{version} is {state}" for version, state in found.items() if state != "ready"]
    return ", ".join(unready) or None


def release_shown(info: ReleaseInfo | None) -> dict[str, Any] | None:
    """The release as the audit log shows it."""
    if info is None:
        return None
    targets = [{"version": target.version, "weight": target.weight} for target in info.targets]
    shown = {"revision": info.revision, "targets": targets, "sticky": info.sticky}
    shadow = info.plan.shadow
    more = {
        "restores": info.restores,
        "guard": info.plan.guard,
        "schedule": info.plan.schedule,
        "shadow": None if shadow is None else shadow_columns(shadow),
        "status": None if info.run is None else info.run.status,
        "reason": info.reason,
    }
    return shown | {name: value for name, value in more.items() if value is not None}


def shadow_columns(plan: ShadowPlan) -> dict[str, Any]:
    """The plan as JSON, as `ShadowPlan` takes it."""
    return {"version": plan.version, "sample": plan.sample, "keep_texts": plan.keep_texts}


def release_info(row: Release) -> ReleaseInfo:
    return ReleaseInfo(
        tenant_id=row.tenant_id,
        name=row.name,
        revision=row.revision,
        targets=tuple(ReleaseTarget(target["version"], target["weight"]) for target in row.targets),
        sticky=cast(Sticky, row.sticky),
        created_at=row.created_at,
        origin=cast(ReleaseOrigin | None, row.origin),
        restores=row.restores,
        actor=cast(ActorKind | None, row.actor),
        actor_key_id=row.actor_key_id,
        plan=ReleasePlan(row.guard, row.schedule, None if row.shadow is None else ShadowPlan(**row.shadow)),
        began=row.began,
        reason=row.reason,
    )


def with_run(info: ReleaseInfo, run: ReleaseRun | None) -> ReleaseInfo:
    """The release with where it stands, if `run` is this one's."""
    if run is None or run.revision != info.revision:
        return info
    return replace(info, run=run_info(run))


def run_info(row: ReleaseRun) -> RunInfo:
    return RunInfo(
        began=row.began,
        revision=row.revision,
        status=cast(RunStatus, row.status),
        step=row.step,
        since=row.since,
        control=row.control,
        candidate=row.candidate,
        reason=row.reason,
    )
