"""Releases that are run, as rows of the database."""

from __future__ import annotations

from loraplex.control.db.database import Database, utc_now
from loraplex.control.db.release_tables import ReleaseRun
from loraplex.control.db.tables import Adapter
from loraplex.control.release_types import ReleaseInfo, ReleaseTarget, RunInfo, RunStatus, Sticky


def begin_run(database: Database, tenant: str, name: str, *, control: int, candidate: int) -> None:
    """A release of this name begins, or begins again. The tenant has to be there, the versions do not."""
    with database.write() as session:
        if session.get(Adapter, (tenant, name)) is None:
            session.add(Adapter(tenant_id=tenant, name=name, last_number=candidate, created_at=utc_now()))
            session.flush()
        run = ReleaseRun(
            tenant_id=tenant,
            name=name,
            began=2,
            revision=2,
            status="running",
            step=0,
            since=utc_now().timestamp(),
            control=control,
            candidate=candidate,
        )
        session.merge(run)


def end_run(database: Database, tenant: str, name: str, *, status: RunStatus) -> None:
    """The release is not moved any more."""
    with database.write() as session:
        run = session.get(ReleaseRun, (tenant, name))
        assert run is not None
        run.status = status


def running_release(
    tenant: str,
    name: str,
    *,
    control: int,
    candidate: int,
    sticky: Sticky = "user",
    status: RunStatus = "running",
) -> ReleaseInfo:
    """A release of two versions as requests see it."""
    now = utc_now()
    targets = (ReleaseTarget(f"v{control}", 90), ReleaseTarget(f"v{candidate}", 10))
    run = RunInfo(2, 2, status, 0, now.timestamp(), control, candidate)
    return ReleaseInfo(tenant, name, 2, targets, sticky, now, run=run)
