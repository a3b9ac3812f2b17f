"""Old versions that nobody needs: deleted when a name has more than are to be kept."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.catalog.release_reading import current_release
from loraplex.control.catalog.versions import version_target
from loraplex.control.db.database import Database
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.release_types import ReleaseInfo
from loraplex.control.types import Removal

NOTHING = Removal((), ())


class Retention:
    """Keeps the newest `keep` living versions of a name (0: all), and any that is pinned or that its release names,
    with whatever weight or as its shadow. A version that waits for its check is kept, and is not counted. What runs on
    a deleted version finishes, as after any deletion."""

    def __init__(self, database: Database, artifacts: Artifacts, keep: int) -> None:
        self._database = database
        self._artifacts = artifacts
        self._keep = keep

    def apply(self, tenant_id: str, name: str, *, by: Actor = LOCAL) -> Removal:
        """Delete what is not kept of a name, with an audit row each; the engine is for the caller to inform."""
        if not self._keep or not self._surplus_now(tenant_id, name):
            return NOTHING
        store = self._artifacts.store
        with self._artifacts.lock:
            with self._database.write() as session:
                digests = []
                for row in _surplus(session, tenant_id, name, self._keep):
                    before = {"digest": row.digest, "state": row.state, "pinned": False, "released": False}
                    target = version_target(tenant_id, name, f"v{row.number}")
                    after = {"keep_versions": self._keep}
                    record(
                        session, by, "version.delete", target, tenant_id=tenant_id, before=before, after=after
                    )
                    digests.append(row.digest)
                    row.state = "deleted"
                store.fault(FaultPoint.COMMIT_REMOVAL)
            store.fault(FaultPoint.REMOVAL_COMMITTED)
            return self._artifacts.remove_unused(digests)

    def _surplus_now(self, tenant_id: str, name: str) -> bool:
        """Most uploads have nothing to delete, and take no lock for it."""
        with self._database.read() as session:
            return bool(_surplus(session, tenant_id, name, self._keep))


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


def _named(release: ReleaseInfo) -> set[str]:
    shadow = release.plan.shadow
    named = {target.version for target in release.targets}
    return named if shadow is None else named | {shadow.version}
