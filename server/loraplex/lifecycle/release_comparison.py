"""A release's versions side by side: requests of the ledger, the guard's readings, the shadow's samples."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from loraplex.control.catalog.release_reading import require_release
from loraplex.control.catalog.shadow_store import ShadowStore, began_of
from loraplex.control.db.database import Database
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.release_types import ReleaseInfo, ShadowInfo
from loraplex.control.usage.arms import ArmSummary, compare_arms
from loraplex.lifecycle.release_guard.course import Course
from loraplex.lifecycle.release_guard.guard import Guard, GuardStateInvalid


@dataclass(frozen=True, slots=True)
class ReleaseComparison:
    """The arms of `release` since `since`, and the course of its evidence over all its steps. `guard` and `shadow` are
    None where there is none."""

    release: ReleaseInfo
    since: datetime
    arms: tuple[ArmSummary, ...]
    guard: Guard | None
    course: Course
    shadow: ShadowInfo | None


def compare_release(database: Database, tenant_id: str, name: str) -> ReleaseComparison:
    """Compare the versions of the release in force, and those of the run that ended with it. Raises TenantNotFound,
    ReleaseNotFound."""
    with database.read(report=True) as session:
        release = require_release(session, tenant_id, name)
        run = None if release.run is None else session.get(ReleaseRun, (tenant_id, name))
        guard = _guard_of(run)
        course = Course.from_json(None if run is None else run.course)
        since = release.created_at if guard is None else datetime.fromtimestamp(guard.since, UTC)
        arms = compare_arms(session, tenant_id, name, _versions(release), since)
    shadow = ShadowStore(database).read(tenant_id, name, began_of(release))
    return ReleaseComparison(release, since, tuple(arms), guard, course, shadow)


def _versions(release: ReleaseInfo) -> list[int]:
    """Those that take traffic, and the two of the run, by number."""
    versions = {int(target.version[1:]) for target in release.targets if target.weight}
    return sorted(
        versions if release.run is None else versions | {release.run.control, release.run.candidate}
    )


def _guard_of(run: ReleaseRun | None) -> Guard | None:
    """The guard of the release's run, which an ended one keeps."""
    if run is None or run.guard_state is None:
        return None
    try:
        return Guard.from_json(run.guard_state)
    except GuardStateInvalid:  # of another version of Loraplex; the leader begins the step again
        return None
