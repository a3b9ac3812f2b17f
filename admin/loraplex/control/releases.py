"""What a bare adapter name means: versions and their weights, and what they were before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from loraplex.adapters.ref import AdapterRef
from loraplex.control.audit import LOCAL, Actor, record
from loraplex.control.clock import database_now
from loraplex.control.database import Database
from loraplex.control.errors import Conflict, InvalidValue, ReleaseNotFound
from loraplex.control.tables import AdapterVersion, Release
from loraplex.control.tenants import require_tenant, tenant_target
from loraplex.control.types import ReleaseInfo, ReleaseTarget, Sticky
from loraplex.control.versions import version_info

MAX_TARGETS = 16
MAX_WEIGHT = 1_000_000
MAX_REVISIONS = 100
"""Releases of a name that are kept: so many steps back there are, and no more for `Resolver` to look through."""


class Releases:
    """All calls are synchronous and atomic. What changes something is recorded as done `by` somebody."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant_id: str, name: str) -> ReleaseInfo:
        with self._database.read() as session:
            return _require_release(session, tenant_id, name)

    def newest(self, limit: int) -> list[ReleaseInfo]:
        """At most `limit` releases in force, of all tenants, the newest first."""
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
        by: Actor = LOCAL,
    ) -> ReleaseInfo:
        """Raises InvalidValue for targets that are not ready versions of this name, ReleaseNotFound."""
        with self._database.write() as session:
            before = _require_release(session, tenant_id, name)
            _check_targets(session, tenant_id, name, targets)
            if sticky not in get_args(Sticky):
                raise InvalidValue("'sticky' is user, key or none.", param="sticky")
            after = add_release(session, tenant_id, name, targets, cast(Sticky, sticky))
            return _recorded(session, by, "release.set", before, after)

    def promote(
        self, tenant_id: str, name: str, version: str | None = None, *, by: Actor = LOCAL
    ) -> ReleaseInfo:
        """All traffic to `version`, or to the newest ready one."""
        with self._database.write() as session:
            release = _require_release(session, tenant_id, name)
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
            after = add_release(session, tenant_id, name, targets, release.sticky)
            return _recorded(session, by, "release.promote", release, after)

    def rollback(self, tenant_id: str, name: str, *, by: Actor = LOCAL) -> ReleaseInfo:
        """To the newest earlier release that differs and whose versions are all ready."""
        with self._database.write() as session:
            release = _require_release(session, tenant_id, name)
            ready = _ready_versions(session, tenant_id, name)
            query = select(Release).where(
                Release.tenant_id == tenant_id, Release.name == name, Release.revision < release.revision
            )
            for row in session.scalars(query.order_by(Release.revision.desc())):
                earlier = _release_info(row)
                usable = bool(earlier.targets) and all(t.version in ready for t in earlier.targets)
                if usable and earlier.targets != release.targets:
                    after = add_release(session, tenant_id, name, earlier.targets, earlier.sticky)
                    return _recorded(session, by, "release.rollback", release, after)
            raise Conflict(f"'{name}' has no earlier release to go back to.")


def current_release(session: Session, tenant_id: str, name: str) -> ReleaseInfo | None:
    query = select(Release).where(Release.tenant_id == tenant_id, Release.name == name)
    row = session.scalars(query.order_by(Release.revision.desc())).first()
    return None if row is None else _release_info(row)


def current_releases(session: Session, tenant_id: str) -> dict[str, ReleaseInfo]:
    """Of all the tenant's names at once."""
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
    session: Session, tenant_id: str, name: str, targets: Sequence[ReleaseTarget], sticky: Sticky
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


def release_shown(info: ReleaseInfo | None) -> dict[str, Any] | None:
    """For the audit log."""
    if info is None:
        return None
    targets = [{"version": target.version, "weight": target.weight} for target in info.targets]
    return {"revision": info.revision, "targets": targets, "sticky": info.sticky}


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


def _check_targets(session: Session, tenant_id: str, name: str, targets: Sequence[ReleaseTarget]) -> None:
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise InvalidValue(f"'targets' has 1 to {MAX_TARGETS} entries.", param="targets")
    if len({target.version for target in targets}) != len(targets):
        raise InvalidValue("'targets' names a version twice.", param="targets")
    if any(not 0 <= target.weight <= MAX_WEIGHT for target in targets):
        raise InvalidValue(f"A target's weight is from 0 to {MAX_WEIGHT}.", param="targets")
    if not any(target.weight for target in targets):
        raise InvalidValue("At least one target needs a weight above 0.", param="targets")
    ready = _ready_versions(session, tenant_id, name)
    missing = [target.version for target in targets if target.version not in ready]
    if missing:
        raise InvalidValue(
            f"'{name}' has no version {missing[0][:40]} that is ready; ready: {', '.join(sorted(ready)) or 'none'}.",
            param="targets",
        )


def _ready_versions(session: Session, tenant_id: str, name: str) -> set[str]:
    query = select(AdapterVersion.number).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name, AdapterVersion.state == "ready"
    )
    return {f"v{number}" for number in session.scalars(query)}


def _release_info(row: Release) -> ReleaseInfo:
    return ReleaseInfo(
        tenant_id=row.tenant_id,
        name=row.name,
        revision=row.revision,
        targets=tuple(ReleaseTarget(target["version"], target["weight"]) for target in row.targets),
        sticky=cast(Sticky, row.sticky),
        created_at=row.created_at,
    )
