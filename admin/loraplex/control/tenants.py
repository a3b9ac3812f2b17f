"""Tenants: who is served, at which weight, under which limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from loraplex.adapters.steps import Step
from loraplex.control import rules
from loraplex.control.artifacts import Artifacts
from loraplex.control.clock import database_now
from loraplex.control.database import Database, note_change
from loraplex.control.errors import Conflict, TenantNotFound
from loraplex.control.tables import AdapterVersion, Tenant
from loraplex.control.types import Page, Removal, TenantInfo

MAX_IDS = 500
"""Ids that one query names."""


class Tenants:
    """All calls are synchronous and atomic; async callers use `Database.run`."""

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
    ) -> TenantInfo:
        """Raises InvalidValue, Conflict (the id is taken)."""
        row = Tenant(
            id=rules.check_tenant_id(tenant_id),
            display_name=rules.check_text(display_name, "display_name"),
            weight=rules.check_weight(weight),
            limits=rules.limits_as_dict(rules.read_limits(limits)),
        )
        with self._database.write() as session:
            if session.get(Tenant, tenant_id) is not None:
                raise Conflict(f"There is a tenant '{tenant_id}' already.", param="id")
            row.created_at = database_now(session)
            session.add(row)
        return tenant_info(row)

    def get(self, tenant_id: str) -> TenantInfo:
        with self._database.read() as session:
            return tenant_info(require_tenant(session, tenant_id))

    def list(self, *, limit: int = rules.DEFAULT_PAGE, cursor: str | None = None) -> Page[TenantInfo]:
        """By id."""
        after = rules.read_cursor(cursor)
        query = select(Tenant).order_by(Tenant.id).limit(rules.check_page_limit(limit) + 1)
        if after is not None:
            query = query.where(Tenant.id > after)
        with self._database.read() as session:
            return rules.make_page(session.scalars(query).all(), limit, lambda row: row.id, tenant_info)

    def weights(self, tenant_ids: Iterable[str]) -> dict[str, float]:
        """Of those of these tenants that there are."""
        wanted = sorted(set(tenant_ids))
        found: dict[str, float] = {}
        with self._database.read() as session:
            for start in range(0, len(wanted), MAX_IDS):
                ids = wanted[start : start + MAX_IDS]
                rows = session.execute(select(Tenant.id, Tenant.weight).where(Tenant.id.in_(ids)))
                found |= dict(rows.tuples().all())
        return found

    def update(self, tenant_id: str, changes: Mapping[str, Any]) -> TenantInfo:
        """Set `display_name`, `weight` or `limits`; a given `limits` replaces only the limits that it names."""
        with self._database.write() as session:
            row = require_tenant(session, tenant_id)
            if "display_name" in changes:
                row.display_name = rules.check_text(changes["display_name"], "display_name")
            if changes.get("weight") is not None:
                row.weight = rules.check_weight(changes["weight"])
            if "limits" in changes:
                merged = {} if changes["limits"] is None else {**row.limits, **changes["limits"]}
                row.limits = rules.limits_as_dict(rules.read_limits(merged))
            session.flush()
            return tenant_info(row)

    def delete(self, tenant_id: str) -> Removal:
        """The tenant with its keys, adapters and versions. Bytes that others have too stay."""
        with self._artifacts.lock:
            with self._database.write() as session:
                row = require_tenant(session, tenant_id)
                digests = set(
                    session.scalars(
                        select(AdapterVersion.digest).where(
                            AdapterVersion.tenant_id == tenant_id, AdapterVersion.state != "deleted"
                        )
                    )
                )
                session.delete(row)
                note_change(session, tenant_subject(tenant_id))
                self._artifacts.store.fault(Step.COMMIT_REMOVAL)
            self._artifacts.store.fault(Step.REMOVAL_COMMITTED)
            return self._artifacts.remove_unused(digests)


def require_tenant(session: Session, tenant_id: str) -> Tenant:
    row = session.get(Tenant, tenant_id)
    if row is None:
        raise TenantNotFound(f"There is no tenant '{tenant_id[:80]}'.")
    return row


def tenant_subject(tenant_id: str) -> str:
    """What `note_change` calls the end of a tenant."""
    return f"tenant:{tenant_id}"


def tenant_info(row: Tenant) -> TenantInfo:
    return TenantInfo(row.id, row.display_name, row.weight, rules.read_limits(row.limits), row.created_at)
