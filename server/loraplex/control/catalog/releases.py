"""Releases: the versions and weights behind a bare adapter name, and their history."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast, get_args

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from loraplex.adapters.ref import AdapterRef
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.catalog.versions import no_adapter, version_info
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Adapter, AdapterVersion, Release
from loraplex.control.errors import Conflict, InvalidValue, PreconditionFailed, ReleaseNotFound
from loraplex.control.rules import (
    DEFAULT_PAGE,
    InvalidCursor,
    check_page_limit,
    make_page,
    read_cursor,
)
from loraplex.control.tenancy.tenants import require_tenant, tenant_target
from loraplex.control.types import (
    MAX_RELEASE_WEIGHT,
    ActorKind,
    Page,
    ReleaseInfo,
    ReleaseOrigin,
    ReleasePlan,
    ReleaseTarget,
    RollbackInfo,
    RunInfo,
    RunStatus,
    ShadowPlan,
    SkippedRevision,
    Sticky,
)

MAX_TARGETS = 16
MAX_REVISIONS = 100
"""Releases of a name that are kept; `rollback` goes back no further."""


class Releases:
    """All calls are synchronous and atomic. Changes are recorded with the actor, `by`. With
    `if_revision` a change is made only where one of these revisions is in force; else it raises PreconditionFailed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant_id: str, name: str) -> ReleaseInfo:
        with self._database.read() as session:
            return _require_release(session, tenant_id, name)

    def newest(self, limit: int) -> list[ReleaseInfo]:
        """The newest `limit` releases in force, of all tenants, newest first."""
        newest = (
            select(Release.tenant_id, Release.name, func.max(Release.revision).label("revision"))
            .group_by(Release.tenant_id, Release.name)
            .subquery()
        )
        query = select(Release).join(
            newest,
            (Release.tenant_id == newest.c.tenant_id)
            & (Release.name == newest.c.name)
            & (Release.revision == newest.c.revision),
        )
        with self._database.read() as session:
            rows = session.scalars(query.order_by(Release.created_at.desc()).limit(limit))
            return [info for info in map(_release_info, rows) if info.targets]

    def serving(self, releases: Sequence[ReleaseInfo]) -> list[AdapterRef]:
        """The versions that take traffic by these releases, in their order, as far as they are ready."""
        with self._database.read() as session:
            rows = (
                session.get(AdapterVersion, (release.tenant_id, release.name, int(target.version[1:])))
                for release in releases
                for target in release.targets
                if target.weight
            )
            return [version_info(row).ref() for row in rows if row is not None and row.state == "ready"]

    def put(
        self,
        tenant_id: str,
        name: str,
        targets: Sequence[ReleaseTarget],
        *,
        sticky: str = "none",
        if_revision: Collection[int] | None = None,
        by: Actor = LOCAL,
    ) -> ReleaseInfo:
        """Raises InvalidValue for targets that are not ready versions of this name, ReleaseNotFound."""
        with self._database.write() as session:
            before = _require_release(session, tenant_id, name)
            _check_revision(before, if_revision)
            _check_targets(session, tenant_id, name, targets)
            if sticky not in get_args(Sticky):
                raise InvalidValue("'sticky' is user, key or none.", param="sticky")
            after = add_release(session, tenant_id, name, targets, cast(Sticky, sticky), origin="set", by=by)
            return _recorded(session, by, "release.set", before, after)

    def promote(
        self,
        tenant_id: str,
        name: str,
        version: str | None = None,
        *,
        if_revision: Collection[int] | None = None,
        by: Actor = LOCAL,
    ) -> ReleaseInfo:
        """All traffic to `version`, or to the newest ready one."""
        with self._database.write() as session:
            release = _require_release(session, tenant_id, name)
            _check_revision(release, if_revision)
            if version is None:
                query = select(AdapterVersion.number).where(
                    AdapterVersion.tenant_id == tenant_id,
                    AdapterVersion.name == name,
                    AdapterVersion.state == "ready",
                )
                newest = session.scalars(query.order_by(AdapterVersion.number.desc())).first()
                if newest is None:
                    raise Conflict(f"'{name}' has no version that is ready.")
                version = f"v{newest}"
            targets = (ReleaseTarget(version, 100),)
            _check_targets(session, tenant_id, name, targets)
            after = add_release(session, tenant_id, name, targets, release.sticky, origin="promote", by=by)
            return _recorded(session, by, "release.promote", release, after)

    def rollback(
        self,
        tenant_id: str,
        name: str,
        *,
        to: int | None = None,
        if_revision: Collection[int] | None = None,
        by: Actor = LOCAL,
    ) -> RollbackInfo:
        """Restore revision `to`, or the release that was in force before this one. After a rollback that is the one
        before the restored one: each further rollback goes one step back.

        A step whose release equals this one is passed over; so is one with a version that is not ready, which is
        `skipped` by name. Raises Conflict where nothing is left, or where `to` cannot be restored; InvalidValue for a
        `to` that is not kept.
        """
        with self._database.write() as session:
            release = _require_release(session, tenant_id, name)
            _check_revision(release, if_revision)
            query = select(Release).where(Release.tenant_id == tenant_id, Release.name == name)
            kept = {row.revision: row for row in session.scalars(query)}
            states = _version_states(session, tenant_id, name)
            if to is None:
                earlier, skipped = _one_step_back(release, kept, states)
            else:
                earlier, skipped = _to_revision(release, to, kept, states), ()
            after = add_release(
                session,
                tenant_id,
                name,
                earlier.targets,
                earlier.sticky,
                origin="rollback",
                restores=earlier.restores or earlier.revision,
                by=by,
            )
            return RollbackInfo(_recorded(session, by, "release.rollback", release, after), skipped)

    def history(
        self, tenant_id: str, name: str, *, limit: int = DEFAULT_PAGE, cursor: str | None = None
    ) -> Page[ReleaseInfo]:
        """The revisions that are kept, the newest first; one without targets ended the name's release."""
        after = read_cursor(cursor)
        query = (
            select(Release)
            .where(Release.tenant_id == tenant_id, Release.name == name)
            .order_by(Release.revision.desc())
            .limit(check_page_limit(limit) + 1)
        )
        if after is not None:
            if not after.isascii() or not after.isdecimal() or len(after) > 9:
                raise InvalidCursor("The cursor is not one that this list gave.", param="cursor")
            query = query.where(Release.revision < int(after))
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            if session.get(Adapter, (tenant_id, name)) is None:
                raise no_adapter(tenant_id, name)
            rows = session.scalars(query).all()
            return make_page(rows, limit, lambda row: str(row.revision), _release_info)


def _one_step_back(
    release: ReleaseInfo, kept: dict[int, Release], states: dict[str, str]
) -> tuple[ReleaseInfo, tuple[SkippedRevision, ...]]:
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


def _before(release: ReleaseInfo, kept: dict[int, Release]) -> Iterator[ReleaseInfo]:
    """Releases in force before `release`, newest first. A release that a rollback restored has its place in history
    where it was first in force, so that rollbacks do not go in circles."""
    origin = release.restores or release.revision
    while (row := kept.get(origin - 1)) is not None and row.targets:  # none: the name was deleted then
        earlier = _release_info(row)
        yield earlier
        origin = earlier.restores or earlier.revision


def _to_revision(
    release: ReleaseInfo, to: int, kept: dict[int, Release], states: dict[str, str]
) -> ReleaseInfo:
    if to == release.revision:
        raise Conflict(f"Revision {to} of '{release.name}' is in force.", param="to")
    if to not in kept:
        raise InvalidValue(
            f"'{release.name}' has no revision {to}; kept are {min(kept)} to {max(kept)}.", param="to"
        )
    earlier = _release_info(kept[to])
    reason = _unusable(earlier, states) if earlier.targets else "it released nothing"
    if reason is not None:
        raise Conflict(f"Revision {to} of '{release.name}' cannot be restored: {reason}.", param="to")
    return earlier


def _unusable(release: ReleaseInfo, states: dict[str, str]) -> str | None:
    """Why it cannot be in force, if it cannot."""
    found = {target.version: states.get(target.version, "deleted") for target in release.targets}
    unready = [f"{version} is {state}" for version, state in found.items() if state != "ready"]
    return ", ".join(unready) or None


def current_release(session: Session, tenant_id: str, name: str) -> ReleaseInfo | None:
    query = select(Release).where(Release.tenant_id == tenant_id, Release.name == name)
    row = session.scalars(query.order_by(Release.revision.desc()).limit(1)).first()
    if row is None:
        return None
    run = None if row.guard is None and row.schedule is None else session.get(ReleaseRun, (tenant_id, name))
    return replace(_release_info(row), run=None if run is None else run_info(run))


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
    return {row.name: _release_info(row) for row in rows}


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
) -> ReleaseInfo:
    """The next revision; no targets at all end the name's release."""
    before = current_release(session, tenant_id, name)
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
    )
    session.add(row)
    session.flush()
    session.execute(
        delete(Release).where(
            Release.tenant_id == tenant_id,
            Release.name == name,
            Release.revision <= row.revision - MAX_REVISIONS,
        )
    )
    return _release_info(row)


def release_only(session: Session, tenant_id: str, name: str, version: str, *, by: Actor) -> None:
    """All traffic to `version`, which is ready, if it has not all of it already."""
    before = current_release(session, tenant_id, name)
    assert before is not None, "a name with a version has a release"
    if {target.version for target in before.targets if target.weight} == {version}:
        return
    targets = (ReleaseTarget(version, 100),)
    after = add_release(session, tenant_id, name, targets, before.sticky, origin="promote", by=by)
    _recorded(session, by, "release.promote", before, after)


def release_shown(info: ReleaseInfo | None) -> dict[str, Any] | None:
    """The release as the audit log shows it."""
    if info is None:
        return None
    targets = [{"version": target.version, "weight": target.weight} for target in info.targets]
    shown = {"revision": info.revision, "targets": targets, "sticky": info.sticky}
    return shown if info.restores is None else shown | {"restores": info.restores}


def _recorded(
    session: Session, by: Actor, action: str, before: ReleaseInfo, after: ReleaseInfo
) -> ReleaseInfo:
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


def _require_release(session: Session, tenant_id: str, name: str) -> ReleaseInfo:
    require_tenant(session, tenant_id)
    release = current_release(session, tenant_id, name)
    if release is None or not release.targets:
        raise ReleaseNotFound(f"The tenant '{tenant_id}' has no adapter '{name[:80]}' that is released.")
    return release


def _check_revision(release: ReleaseInfo, if_revision: Collection[int] | None) -> None:
    if if_revision is not None and release.revision not in if_revision:
        raise PreconditionFailed(
            f"Revision {release.revision} of '{release.name}' is in force, and not the one that If-Match names; look "
            "at it, and decide again.",
            param="If-Match",
        )


def _check_targets(session: Session, tenant_id: str, name: str, targets: Sequence[ReleaseTarget]) -> None:
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidValue(f"'targets' has 1 to {MAX_TARGETS} entries.", param="targets")
    if len({target.version for target in targets}) != len(targets):
        raise InvalidValue("'targets' names a version twice.", param="targets")
    if any(not 0 <= target.weight <= MAX_RELEASE_WEIGHT for target in targets):
        raise InvalidValue(f"A target's weight is from 0 to {MAX_RELEASE_WEIGHT}.", param="targets")
    if not any(target.weight for target in targets):
        raise InvalidValue("At least one target needs a weight above 0.", param="targets")
    states = _version_states(session, tenant_id, name)
    ready = {version for version, state in states.items() if state == "ready"}
    missing = [target.version for target in targets if target.version not in ready]
    if missing:
        raise InvalidValue(
            f"'{name}' has no version {missing[0][:40]} that is ready; ready: {', '.join(sorted(ready)) or 'none'}.",
            param="targets",
        )


def _version_states(session: Session, tenant_id: str, name: str) -> dict[str, str]:
    query = select(AdapterVersion.number, AdapterVersion.state).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name
    )
    return {f"v{number}": state for number, state in session.execute(query)}


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


def _release_info(row: Release) -> ReleaseInfo:
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
