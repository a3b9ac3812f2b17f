"""The check of a new version's numbers: which versions wait for it, and what becomes of them.

A version is `validating` from its upload until the check has a verdict, while its base is served. Then it is `ready`,
or `rejected` and its bytes are not kept. The first verdict decides: any later one finds the version decided, and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.admission.trained_base import NOT_MEASURED_YET, is_to_be_measured, with_figures
from loraplex.adapters.spec import BaseSpec
from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control.adapter_tags import forget_tags
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.recorder import LOCAL, Actor, record
from loraplex.control.catalog.release_changes import add_release, release_only
from loraplex.control.catalog.release_reading import current_release, release_shown
from loraplex.control.catalog.versions import count_living, require_version, version_info, version_target
from loraplex.control.db.database import Database
from loraplex.control.db.tables import AdapterVersion
from loraplex.control.release_types import ReleaseTarget
from loraplex.control.types import Refusal, Removal, VersionInfo

MAX_PENDING = 1000
"""Versions that `pending` gives at a time."""
NOTHING = Removal((), ())


@dataclass(frozen=True, slots=True)
class Decision:
    """A version as it is now. `decided`: this call made it so, and `removal` is the work that is left. `by` uploaded
    the version."""

    info: VersionInfo
    decided: bool
    by: Actor = LOCAL
    removal: Removal = NOTHING


class Validation:
    """All calls are synchronous and atomic. `base` is the model that is served: only a version that was made for it can
    be checked."""

    def __init__(self, database: Database, artifacts: Artifacts, base: BaseSpec) -> None:
        self._database = database
        self._artifacts = artifacts
        self.base = base

    def pending(self) -> list[VersionInfo]:
        """Versions that are `validating`, at most `MAX_PENDING`: of each tenant the oldest first, the tenants in turn.
        So the versions of one that cannot be checked do not hide the others'."""
        turn = func.row_number().over(
            partition_by=AdapterVersion.tenant_id, order_by=(AdapterVersion.created_at, AdapterVersion.name)
        )
        query = (
            select(AdapterVersion)
            .where(
                AdapterVersion.state == "validating",
                AdapterVersion.base_fingerprint == self.base.fingerprint,
            )
            .order_by(turn, AdapterVersion.created_at, AdapterVersion.tenant_id)
            .limit(MAX_PENDING)
        )
        with self._database.read() as session:
            return [version_info(row) for row in session.scalars(query)]

    def unmeasured(self) -> list[VersionInfo]:
        """Versions that are `ready`, whose report lacks figures of a base in another form: at most `MAX_PENDING`, the
        oldest first."""
        query = (
            select(AdapterVersion)
            .where(
                AdapterVersion.state == "ready",
                AdapterVersion.base_fingerprint == self.base.fingerprint,
                AdapterVersion.report["base_error"]["reason"].as_string() == NOT_MEASURED_YET,
            )
            .order_by(AdapterVersion.created_at, AdapterVersion.tenant_id, AdapterVersion.name)
            .limit(MAX_PENDING)
        )
        with self._database.read() as session:
            return [version_info(row) for row in session.scalars(query)]

    def current(self, info: VersionInfo) -> VersionInfo:
        """The version as it is now. Raises as `accept`."""
        with self._database.read() as session:
            return version_info(require_version(session, info.tenant_id, info.name, info.version))

    def record_base_error(
        self, info: VersionInfo, figures: Mapping[str, Any], *, warn_above: float
    ) -> VersionInfo:
        """Add the figures, as `trained_base.with_figures` takes them, to the report of a version that is ready and
        lacks them. The first figures stay. Raises as `accept`."""
        with self._database.write() as session:
            row = require_version(session, info.tenant_id, info.name, info.version)
            if row.state == "ready" and is_to_be_measured(row.report):
                row.report = with_figures(row.report, figures, warn_above=warn_above)
                session.flush()
            return version_info(row)

    def accept(
        self,
        info: VersionInfo,
        reference_error: dict[str, Any] | None,
        agreement: dict[str, Any] | None = None,
    ) -> Decision:
        """Make a version that is `validating` ready. It is released if nothing of its name is, or if its upload asked
        for that and no later version was released meanwhile. `reference_error` and `agreement` go to its report; None:
        its series did not want the one or the other. Raises TenantNotFound, AdapterNotFound, VersionNotFound."""

        def decide(session: Session, row: AdapterVersion, release: bool, by: Actor) -> None:
            row.state, row.pending_check = "ready", None
            row.report = row.report | _found(reference_error, agreement)
            session.flush()
            _release_ready(session, row, release, by)
            _record_check(session, row, by, reference_error or {}, agreement)

        with self._database.write() as session:
            decision = self._decide(session, info, decide)
        self._artifacts.store.fault(FaultPoint.CHECK_COMMITTED)
        return decision

    def reject(
        self,
        info: VersionInfo,
        refusal: Refusal,
        reference_error: dict[str, Any] | None,
        agreement: dict[str, Any] | None = None,
    ) -> Decision:
        """Reject a version that is `validating`. Its bytes go unless another version has them; its report keeps the
        refusal. With the last version of a name its tags go. Raises as `accept`."""

        def decide(session: Session, row: AdapterVersion, release: bool, by: Actor) -> None:
            row.state, row.pending_check, row.chat = "rejected", None, None
            shown = {"code": refusal.code, "message": refusal.message}
            row.report = row.report | _found(reference_error, agreement) | {"refusal": shown}
            session.flush()
            is_last = not count_living(session, row.tenant_id, row.name)
            gone = forget_tags(session, row.tenant_id, row.name) if is_last else {}
            _record_check(session, row, by, reference_error or {}, agreement, code=refusal.code, gone=gone)

        with self._artifacts.lock:
            with self._database.write() as session:
                decision = self._decide(session, info, decide)
            self._artifacts.store.fault(FaultPoint.CHECK_COMMITTED)
            if not decision.decided:
                return decision
            return replace(decision, removal=self._artifacts.remove_unused([info.digest]))

    def _decide(
        self,
        session: Session,
        info: VersionInfo,
        decide: Callable[[Session, AdapterVersion, bool, Actor], None],
    ) -> Decision:
        """`decide` on the version's row if it is still `validating`. No other transaction writes meanwhile."""
        row = require_version(session, info.tenant_id, info.name, info.version)
        if row.state != "validating":
            return Decision(version_info(row), decided=False)
        assert row.pending_check is not None, "a version that is validating has a pending check"
        by = Actor(*row.pending_check["actor"])
        decide(session, row, _is_to_be_released(session, row, row.pending_check.get("release_after")), by)
        row.pending_agreement = None
        self._artifacts.store.fault(FaultPoint.COMMIT_CHECK)
        return Decision(version_info(row), decided=True, by=by)


def _found(reference_error: dict[str, Any] | None, agreement: dict[str, Any] | None) -> dict[str, Any]:
    """The findings of a check, for the version's report."""
    found = {"reference_error": reference_error, "agreement": agreement}
    return {name: value for name, value in found.items() if value is not None}


def pending_check(by: Actor) -> dict[str, Any]:
    """Columns of a version whose numbers are to be checked, uploaded by `by`."""
    return {"actor": [by.kind, by.tenant_id, by.key_id, by.source, by.request_id]}


def release_upload(session: Session, row: AdapterVersion, *, release: bool, by: Actor) -> None:
    """The first version of a name serves at once; later ones wait for a release, or get it at once where `release` asks
    for it. None serves before its check."""
    if row.pending_check is None:
        _release_ready(session, row, release, by)
    elif release:
        in_force = current_release(session, row.tenant_id, row.name)
        revision = 0 if in_force is None else in_force.revision
        row.pending_check = row.pending_check | {"release_after": revision}


def _is_to_be_released(session: Session, row: AdapterVersion, asked_at: int | None) -> bool:
    """Whether its upload asked for all the traffic, at the release with this revision, and no later version has got
    traffic since: a check that is late must not bring an older version back."""
    if asked_at is None:
        return False
    in_force = current_release(session, row.tenant_id, row.name)
    if in_force is None or in_force.revision <= asked_at:
        return True
    return all(int(target.version[1:]) < row.number for target in in_force.targets if target.weight)


def _release_ready(session: Session, row: AdapterVersion, release: bool, by: Actor) -> None:
    in_force = current_release(session, row.tenant_id, row.name)
    if in_force is None or not in_force.targets:
        targets = (ReleaseTarget(f"v{row.number}", 100),)
        add_release(session, row.tenant_id, row.name, targets, "none", origin="upload", by=by)
    elif release:
        release_only(session, row.tenant_id, row.name, f"v{row.number}", by=by)


def _record_check(
    session: Session,
    row: AdapterVersion,
    by: Actor,
    found: dict[str, Any],
    agreement: dict[str, Any] | None,
    *,
    code: str | None = None,
    gone: Mapping[str, Any] | None = None,
) -> None:
    """`gone`: what went with it."""
    after = {
        "digest": row.digest,
        "state": row.state,
        "verdict": found.get("verdict"),
        "max_error": found.get("max"),
        "tolerance": found.get("tolerance"),
        "release": release_shown(current_release(session, row.tenant_id, row.name)),
    } | ({} if agreement is None else {"agreement": agreement})
    record(
        session,
        by,
        "version.check",
        version_target(row.tenant_id, row.name, f"v{row.number}"),
        tenant_id=row.tenant_id,
        before={"state": "validating"} | dict(gone or {}),
        after=after,
        outcome="done" if code is None else "refused",
        code=code,
    )
