"""Tenants, their weights and their limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, delete, func, select
from sqlalchemy.orm import Session

from loraplex.adapters.store.fault_points import FaultPoint
from loraplex.control import rules
from loraplex.control.artifacts import Artifacts, lost_pins
from loraplex.control.audit.recorder import LOCAL, Actor, FreeText, record
from loraplex.control.db.batch_tables import Batch, StoredFile
from loraplex.control.db.clock import database_now
from loraplex.control.db.database import Database, note_change
from loraplex.control.db.tables import (
    LIVING,
    AdapterVersion,
    ApiKey,
    AuditRow,
    AuditText,
    Base,
    DeletedTenant,
    Series,
    Tenant,
    Usage,
    UsageDay,
)
from loraplex.control.errors import Conflict, InvalidValue, TenantIdRetired, TenantNotFound
from loraplex.control.limits.budget_store import budget_states
from loraplex.control.tenancy.stored import stored_of
from loraplex.control.types import Limits, Page, TenantInfo, TenantRemoval
from loraplex.engine.tenant_terms import TenantTerms

MAX_IDS = 500
"""Ids that one query names."""


class Tenants:
    """All calls are synchronous and atomic; async callers use `Database.run`. What changes something is recorded as
    with the actor, `by`."""

    def __init__(self, database: Database, artifacts: Artifacts) -> None:
        self._database = database
        self._artifacts = artifacts

    def create(
        self,
        tenant_id: str,
        *,
        display_name: str | None = None,
        weight: float = 1.0,
        limits: Mapping[str, Any] | None = None,
        reservable: int | None = None,
        by: Actor = LOCAL,
    ) -> TenantInfo:
        """Raises InvalidValue, Conflict (the id is taken), TenantIdRetired (it was, and is not given again).
        `reservable`: see `update`."""
        row = Tenant(
            id=rules.check_tenant_id(tenant_id),
            display_name=rules.check_text(display_name, "display_name"),
            weight=rules.check_weight(weight),
            limits=rules.limits_as_dict(rules.read_limits(limits)),
        )
        with self._database.write() as session:
            if session.get(Tenant, tenant_id) is not None:
                raise Conflict(f"There is a tenant '{tenant_id}' already.", param="id")
            if session.get(DeletedTenant, tenant_id) is not None:
                raise TenantIdRetired(
                    f"There was a tenant '{tenant_id}', and its usage is still on record: choose another id.",
                    param="id",
                )
            _check_reservation(session, row, limits, reservable)
            row.created_at = database_now(session)
            session.add(row)
            session.flush()
            record(
                session, by, "tenant.create", tenant_target(tenant_id), tenant_id=tenant_id, after=_shown(row)
            )
            return tenant_infos(session, [row])[0]

    def get(self, tenant_id: str) -> TenantInfo:
        with self._database.read() as session:
            return tenant_infos(session, [require_tenant(session, tenant_id)])[0]

    def list(self, *, limit: int = rules.DEFAULT_PAGE, cursor: str | None = None) -> Page[TenantInfo]:
        """List tenants by id."""
        after = rules.read_cursor(cursor)
        query = select(Tenant).order_by(Tenant.id).limit(rules.check_page_limit(limit) + 1)
        if after is not None:
            query = query.where(Tenant.id > after)
        with self._database.read() as session:
            infos = tenant_infos(session, session.scalars(query).all())
            return rules.make_page(infos, limit, lambda info: info.id, lambda info: info)

    def terms(self, tenant_ids: Iterable[str]) -> dict[str, TenantTerms]:
        """The terms of those of these tenants that exist."""
        wanted = sorted(set(tenant_ids))
        found: dict[str, TenantTerms] = {}
        with self._database.read() as session:
            for start in range(0, len(wanted), MAX_IDS):
                ids = wanted[start : start + MAX_IDS]
                rows = session.execute(
                    select(Tenant.id, Tenant.weight, Tenant.limits).where(Tenant.id.in_(ids))
                )
                for tenant_id, weight, limits in rows.tuples():
                    found[tenant_id] = TenantTerms(weight, Limits(**limits).memory)
        return found

    def deleted(self, tenant_ids: Iterable[str]) -> set[str]:
        """Those of these tenants that were deleted."""
        wanted, found = sorted(set(tenant_ids)), set[str]()
        with self._database.read() as session:
            for start in range(0, len(wanted), MAX_IDS):
                chosen = DeletedTenant.id.in_(wanted[start : start + MAX_IDS])
                found.update(session.scalars(select(DeletedTenant.id).where(chosen)))
        return found

    def update(
        self,
        tenant_id: str,
        changes: Mapping[str, Any],
        *,
        reservable: int | None = None,
        by: Actor = LOCAL,
    ) -> TenantInfo:
        """Set `display_name`, `weight`, `limits` or `suspended`; a given `limits` replaces only those that it names.
        `reservable` are the bytes that the reservations of all tenants may have together; None is not known."""
        with self._database.write() as session:
            row = require_tenant(session, tenant_id)
            before = _shown(row)
            if "display_name" in changes:
                row.display_name = rules.check_text(changes["display_name"], "display_name")
            if changes.get("weight") is not None:
                row.weight = rules.check_weight(changes["weight"])
            if "limits" in changes:
                row.limits = rules.limits_as_dict(rules.change_limits(row.limits, changes["limits"]))
                _check_reservation(session, row, changes["limits"], reservable)
            if changes.get("suspended") is not None:
                since = row.suspended_at or database_now(session)
                row.suspended_at = since if changes["suspended"] else None
                note_change(session, tenant_subject(tenant_id))
            session.flush()
            target = tenant_target(tenant_id)
            record(
                session, by, "tenant.update", target, tenant_id=tenant_id, before=before, after=_shown(row)
            )
            return tenant_infos(session, [row])[0]

    def would_delete(self, tenant_id: str) -> TenantRemoval:
        """The answer that `delete` would give now, without `unpinned`. Raises TenantNotFound."""
        with self._database.read() as session:
            require_tenant(session, tenant_id)
            digests = _digests_of(session, tenant_id)
            texts = select(func.count()).select_from(AuditText).where(AuditText.tenant_id == tenant_id)
            own = set(digests) - set(_shared_of(session, tenant_id, digests))
            return TenantRemoval(
                tuple(sorted(own)),
                (),
                tenant_id=tenant_id,
                num_bytes=sum(digests[digest] for digest in own),
                num_texts=session.scalar(texts) or 0,
                usage_since=_usage_since(session, tenant_id),
                **_count_all(session, tenant_id, digests),
            )

    def delete(self, tenant_id: str, *, by: Actor = LOCAL) -> TenantRemoval:
        """The tenant with its keys, adapters, versions, files and batches, and its free texts in the audit log.
        Artifacts that others have too stay, and so do the audit rows; the id is not given again."""
        with self._artifacts.lock:
            with self._database.write() as session:
                row = require_tenant(session, tenant_id)
                digests = _digests_of(session, tenant_id)
                found = _count_all(session, tenant_id, digests)
                usage_since = _usage_since(session, tenant_id)
                pinned = _pinned_of(session, tenant_id)
                session.delete(row)
                session.flush()
                unpinned = lost_pins(session, pinned)
                session.add(DeletedTenant(id=tenant_id, deleted_at=database_now(session)))
                erased = session.execute(delete(AuditText).where(AuditText.tenant_id == tenant_id))
                found["num_texts"] = cast("CursorResult[Any]", erased).rowcount
                before = {"weight": row.weight, "limits": row.limits, "digests": sorted(digests)}
                target = tenant_target(tenant_id)
                record(session, by, "tenant.delete", target, tenant_id=tenant_id, before=before, after=found)
                note_change(session, tenant_subject(tenant_id))
                self._artifacts.store.fault(FaultPoint.COMMIT_REMOVAL)
            self._artifacts.store.fault(FaultPoint.REMOVAL_COMMITTED)
            removal = self._artifacts.remove_unused(digests, unpinned)
        num_bytes = sum(size for digest, size in digests.items() if digest in removal.digests)
        return TenantRemoval(
            removal.digests,
            removal.unpinned,
            tenant_id=tenant_id,
            num_bytes=num_bytes,
            usage_since=usage_since,
            **found,
        )


def require_tenant(session: Session, tenant_id: str) -> Tenant:
    row = session.get(Tenant, tenant_id)
    if row is None:
        raise TenantNotFound(f"There is no tenant '{tenant_id[:80]}'.")
    return row


def tenant_target(tenant_id: str) -> str:
    """A tenant's name in the audit log."""
    return f"tenants/{tenant_id}"


def tenant_subject(tenant_id: str) -> str:
    """The name that `note_change` has for the end of a tenant, or of what its keys may do."""
    return f"tenant:{tenant_id}"


def tenant_infos(session: Session, rows: Sequence[Tenant]) -> list[TenantInfo]:
    limits = {row.id: rules.read_limits(row.limits) for row in rows}
    budgets = budget_states(session, "tenant", limits)
    stored = stored_of(session, limits)
    return [
        TenantInfo(
            row.id,
            row.display_name,
            row.weight,
            limits[row.id],
            row.created_at,
            row.suspended_at,
            budgets.get(row.id),
            stored[row.id],
        )
        for row in rows
    ]


def _check_reservation(
    session: Session, row: Tenant, given: Mapping[str, Any] | None, reservable: int | None
) -> None:
    """Raises InvalidValue where a reservation is made that cannot be kept beside the other tenants'."""
    wanted = row.limits.get("device_bytes_reserved")
    if reservable is None or wanted is None or not (given or {}).get("device_bytes_reserved"):
        return
    reserved = Tenant.limits["device_bytes_reserved"].as_numeric(20, 0)
    others = session.scalar(select(func.sum(reserved)).where(Tenant.id != row.id))
    left = max(0, reservable - int(others or 0))
    if wanted > left:
        raise InvalidValue(
            f"Reservations of all tenants may hold {reservable} bytes of the device's memory; {left} of them are left.",
            param="limits.device_bytes_reserved",
        )


def _shown(row: Tenant) -> dict[str, Any]:
    """The tenant as the audit log shows it."""
    return {
        "display_name": FreeText(row.display_name),
        "weight": row.weight,
        "limits": row.limits,
        "suspended": row.suspended_at is not None,
    }


def _digests_of(session: Session, tenant_id: str) -> dict[str, int]:
    """Digests of the tenant's living versions, each with its bytes."""
    query = select(AdapterVersion.digest, AdapterVersion.bytes).where(
        AdapterVersion.tenant_id == tenant_id, LIVING
    )
    return {row.digest: row.bytes for row in session.execute(query)}


def _pinned_of(session: Session, tenant_id: str) -> list[str]:
    """Digests of the tenant's pinned versions."""
    query = select(AdapterVersion.digest).where(AdapterVersion.tenant_id == tenant_id, AdapterVersion.pinned)
    return list(session.scalars(query))


def _shared_of(session: Session, tenant_id: str, digests: Collection[str]) -> Sequence[str]:
    """Those of these digests that other tenants have too."""
    return session.scalars(
        select(AdapterVersion.digest)
        .distinct()
        .where(AdapterVersion.tenant_id != tenant_id, LIVING, AdapterVersion.digest.in_(digests))
    ).all()


def _count_all(session: Session, tenant_id: str, digests: Collection[str]) -> dict[str, int]:
    """Counts of a tenant's data, by the names of `TenantRemoval`; the deletion's own audit row counts."""

    def count(kind: type[Base], *where: ColumnElement[bool]) -> int:
        return session.scalar(select(func.count()).select_from(kind).where(*where)) or 0

    names = select(func.count(AdapterVersion.name.distinct())).where(
        AdapterVersion.tenant_id == tenant_id, LIVING
    )
    file_bytes = select(func.sum(StoredFile.bytes)).where(StoredFile.tenant_id == tenant_id)
    return {
        "num_keys": count(ApiKey, ApiKey.tenant_id == tenant_id),
        "num_series": count(Series, Series.tenant_id == tenant_id),
        "num_adapters": session.scalar(names) or 0,
        "num_versions": count(AdapterVersion, AdapterVersion.tenant_id == tenant_id, LIVING),
        "num_files": count(StoredFile, StoredFile.tenant_id == tenant_id),
        "num_file_bytes": int(session.scalar(file_bytes) or 0),  # PostgreSQL sums up to a Decimal
        "num_batches": count(Batch, Batch.tenant_id == tenant_id),
        "num_shared_artifacts": len(_shared_of(session, tenant_id, digests)),
        "num_audit_rows": count(AuditRow, AuditRow.tenant_id == tenant_id) + 1,
    }


def _usage_since(session: Session, tenant_id: str) -> datetime | None:
    """When the tenant's oldest row of the ledger is from. Two looks into indexes, however long the ledger is: to count
    its rows could take longer than a writer may."""
    oldest = [
        session.scalar(select(func.min(Usage.at)).where(Usage.tenant_id == tenant_id)),
        session.scalar(select(func.min(UsageDay.at)).where(UsageDay.tenant_id == tenant_id)),
    ]
    return min((moment for moment in oldest if moment is not None), default=None)
