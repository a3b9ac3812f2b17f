"""Old versions that nobody needs: deleted when a name has more than are to be kept, or retired where it is a series."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.catalog.release_reading import current_release
from loraplex.control.catalog.versions import version_target
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion, Series
from loraplex.control.release_types import ReleaseInfo
from loraplex.control.types import Removal

NOTHING = Removal((), ())


class Retention:
    """Keeps the newest `keep` living versions of a name (0: all), those that a series wants of its own, and any that is
    pinned or that its release names, with whatever weight or as its shadow. A version that waits for its check is kept,
    and is not counted. What runs on a deleted version finishes, as after any deletion."""

    def __init__(self, database: Database, artifacts: Artifacts, keep: int) -> None:
        self._database = database
        self._artifacts = artifacts
        self._keep = keep

    def surplus(self, tenant_id: str, name: str) -> list[str]:
        """Digests of the versions that are not kept of a name. Most uploads have none, and take no lock for it."""
        with self._database.read() as session:
            return [row.digest for row in self._surplus(session, tenant_id, name)]

    def apply(
        self,
        tenant_id: str,
        name: str,
        *,
        among: Collection[str] | None = None,
        in_use: Collection[str] = (),
        by: Actor = LOCAL,
    ) -> Removal:
        """Delete what is not kept of a name, with an audit row each; the engine is for the caller to inform. A series'
        versions whose digests are `in_use`, or not `among` those that were asked about (None: all were), stay until a
        later call."""
        store = self._artifacts.store
        with self._artifacts.lock:
            with self._database.write() as session:
                digests = []
                series = session.get(Series, (tenant_id, name))
                for row in self._surplus(session, tenant_id, name):
                    is_asked = among is None or row.digest in among
                    if series is not None and (row.digest in in_use or not is_asked):
                        continue
                    before = {"digest": row.digest, "state": row.state, "pinned": False, "released": False}
                    target = version_target(tenant_id, name, f"v{row.number}")
                    keep = (
                        {"keep_versions": self._keep} if series is None else {"keep_last": series.keep_last}
                    )
                    record(
                        session, by, "version.delete", target, tenant_id=tenant_id, before=before, after=keep
                    )
                    digests.append(row.digest)
                    remove_version(row, "deleted" if series is None else "retired")
                store.fault(FaultPoint.COMMIT_REMOVAL)
            store.fault(FaultPoint.REMOVAL_COMMITTED)
            return self._artifacts.remove_unused(digests)

    def _surplus(self, session: Session, tenant_id: str, name: str) -> list[AdapterVersion]:
        series = session.get(Series, (tenant_id, name))
        keep = self._keep if series is None else series.keep_last
        return _surplus(session, tenant_id, name, keep) if keep else []


def remove_version(row: AdapterVersion, state: Literal["deleted", "retired"]) -> None:
    """Leave of a version what is known of one that is gone."""
    row.state, row.pinned, row.pending_check, row.chat = state, False, None, None
    row.pending_agreement = None
    if state == "retired":
        row.report = _without_modules(row.report)


def _surplus(session: Session, tenant_id: str, name: str, keep: int) -> list[AdapterVersion]:
    query = (
        select(AdapterVersion)
        .where(
            AdapterVersion.tenant_id == tenant_id,
            AdapterVersion.name == name,
            LIVING,
            AdapterVersion.pending_check.is_(None),
        )
        .order_by(AdapterVersion.number.desc())
        .offset(keep)
    )
    release = current_release(session, tenant_id, name)
    released = set() if release is None else _named(release)
    return [row for row in session.scalars(query) if not row.pinned and f"v{row.number}" not in released]


def _without_modules(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without what it has of each module: a training leaves thousands of versions behind."""
    error = report.get("reference_error") or {}
    kept = {name: value for name, value in error.items() if not isinstance(value, dict)}
    return {**report, "rank_by_module": {}, "reference_error": kept or None}


def _named(release: ReleaseInfo) -> set[str]:
    shadow = release.plan.shadow
    named = {target.version for target in release.targets}
    return named if shadow is None else named | {shadow.version}
