"""Releases: the versions and weights behind a bare adapter name, and their history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast, get_args

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.ref import AdapterRef
from loraplex.control.audit.recorder import LOCAL, Actor
from loraplex.control.catalog.release_changes import add_release, recorded
from loraplex.control.catalog.release_reading import (
    kept_revisions,
    one_step_back,
    release_info,
    require_release,
    to_revision,
    version_states,
    with_run,
)
from loraplex.control.catalog.release_runs import begin_run, pause_run, planned_targets, resume_run
from loraplex.control.catalog.versions import no_adapter, version_info
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Adapter, AdapterVersion, Release
from loraplex.control.errors import Conflict, InvalidValue, PreconditionFailed
from loraplex.control.release_types import (
    MAX_RELEASE_WEIGHT,
    NO_PLAN,
    ReleaseInfo,
    ReleasePlan,
    ReleaseTarget,
    RollbackInfo,
    Sticky,
)
from loraplex.control.rules import (
    DEFAULT_PAGE,
    InvalidCursor,
    check_page_limit,
    make_page,
    read_cursor,
)
from loraplex.control.tenancy.tenants import require_tenant
from loraplex.control.types import Page

MAX_TARGETS = 16


class Releases:
    """All calls are synchronous and atomic. Changes are recorded with the actor, `by`. With
    `if_revision` a change is made only where one of these revisions is in force; else it raises PreconditionFailed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant_id: str, name: str) -> ReleaseInfo:
        with self._database.read() as session:
            return require_release(session, tenant_id, name)

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
            return [info for info in map(release_info, rows) if info.targets]

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
        plan: ReleasePlan = NO_PLAN,
        if_revision: Collection[int] | None = None,
        by: Actor = LOCAL,
    ) -> ReleaseInfo:
        """With a guard or a schedule in `plan`, which are checked JSON, the release is watched from now on; with a
        schedule the weights are those of its first step. Without, whatever watched the name ends.

        Raises InvalidValue for targets that are not ready versions of this name, or do not allow the plan;
        ReleaseNotFound; Conflict where there is a schedule already that has not ended."""
        with self._database.write() as session:
            before = require_release(session, tenant_id, name)
            _check_revision(before, if_revision)
            _check_targets(session, tenant_id, name, targets)
            if sticky not in get_args(Sticky):
                raise InvalidValue("'sticky' is user, key or none.", param="sticky")
            planned = planned_targets(session, before, targets, plan)
            after = add_release(
                session, tenant_id, name, planned, cast(Sticky, sticky), origin="set", plan=plan, by=by
            )
            if plan.guard is not None or plan.schedule is not None:
                after = begin_run(session, after)
            return recorded(session, by, "release.set", before, after)

    def pause(
        self, tenant_id: str, name: str, *, if_revision: Collection[int] | None = None, by: Actor = LOCAL
    ) -> ReleaseInfo:
        """Keep the weights of a watched release as they are, whatever its guard finds. Raises ReleaseNotFound,
        PreconditionFailed; Conflict where none is running."""
        with self._database.write() as session:
            release = require_release(session, tenant_id, name)
            _check_revision(release, if_revision)
            return pause_run(session, release, by=by)

    def resume(
        self, tenant_id: str, name: str, *, if_revision: Collection[int] | None = None, by: Actor = LOCAL
    ) -> ReleaseInfo:
        """Begin the step of a paused release again, with a guard without evidence. Raises as `pause`."""
        with self._database.write() as session:
            release = require_release(session, tenant_id, name)
            _check_revision(release, if_revision)
            return resume_run(session, release, by=by)

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
            release = require_release(session, tenant_id, name)
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
            return recorded(session, by, "release.promote", release, after)

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

        A step whose release equals this one is passed over, and so are the steps of a schedule. So is one with a
        version that is not ready, which is `skipped` by name. Raises Conflict where nothing is left, or where `to`
        cannot be restored; InvalidValue for a `to` that is not kept.
        """
        with self._database.write() as session:
            release = require_release(session, tenant_id, name)
            _check_revision(release, if_revision)
            kept = kept_revisions(session, tenant_id, name)
            states = version_states(session, tenant_id, name)
            if to is None:
                earlier, skipped = one_step_back(release, kept, states)
            else:
                earlier, skipped = to_revision(release, to, kept, states), ()
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
            return RollbackInfo(recorded(session, by, "release.rollback", release, after), skipped)

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
            run = session.get(ReleaseRun, (tenant_id, name))
            return make_page(
                rows, limit, lambda row: str(row.revision), lambda row: with_run(release_info(row), run)
            )


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
    states = version_states(session, tenant_id, name)
    ready = {version for version, state in states.items() if state == "ready"}
    missing = [target.version for target in targets if target.version not in ready]
    if missing:
        raise InvalidValue(
            f"'{name}' has no version {missing[0][:40]} that is ready; ready: {', '.join(sorted(ready)) or 'none'}.",
            param="targets",
        )
