"""Agreements of trainers with versions in the database: what waits to be compared, who is charged, and the figures."""

from __future__ import annotations

from sqlalchemy.orm import Session

from loraplex.control.agreement import Agreement, DueAgreement, TrainerNumbers
from loraplex.control.audit.recorder import Actor, record
from loraplex.control.catalog.versions import require_version, version_target
from loraplex.control.db.database import Database
from loraplex.control.db.tables import ApiKey
from loraplex.control.rules import read_limits
from loraplex.control.tenancy.key_cache import principal_of
from loraplex.control.tenancy.tenants import require_tenant
from loraplex.control.types import Principal, VersionInfo


def pending_agreement(database: Database, info: VersionInfo) -> tuple[DueAgreement, Principal] | None:
    """The comparison that a version waits for, and the principal who is charged: the key that pushed it, as it is now,
    or the tenant where the key is gone or an operator pushed. None: it waits for none. Raises TenantNotFound,
    AdapterNotFound, VersionNotFound."""
    with database.read() as session:
        row = require_version(session, info.tenant_id, info.name, info.version)
        found = row.pending_agreement
        if found is None or row.pending_check is None:
            return None
        numbers = TrainerNumbers(found["tokens"], found["logprobs"])
        actor = Actor(*row.pending_check["actor"])
        return DueAgreement(numbers, found["within"]), _payer(session, info.tenant_id, actor)


def count_failure(database: Database, info: VersionInfo) -> int:
    """Count one more failure of the comparison that a version waits for; how many there were. 0: it waits for none any
    more. Raises TenantNotFound, AdapterNotFound, VersionNotFound."""
    with database.write() as session:
        row = require_version(session, info.tenant_id, info.name, info.version)
        if row.pending_check is None:
            return 0
        failures = int(row.pending_check.get("failures", 0)) + 1
        row.pending_check = row.pending_check | {"failures": failures}
        return failures


def payer(database: Database, tenant_id: str, by: Actor) -> Principal:
    """The principal who is charged for a comparison that `by` asked for. Raises TenantNotFound."""
    with database.read() as session:
        return _payer(session, tenant_id, by)


def _payer(session: Session, tenant_id: str, by: Actor) -> Principal:
    tenant = require_tenant(session, tenant_id)
    key = None if by.key_id is None else session.get(ApiKey, by.key_id)
    if key is not None:
        return principal_of(key, tenant)
    limits = read_limits(tenant.limits)
    return Principal(tenant_id, None, frozenset(), weight=tenant.weight, tenant_limits=limits)


def record_agreement(database: Database, info: VersionInfo, agreement: Agreement, *, by: Actor) -> None:
    """Keep the figures in the version's report, in place of earlier ones. Raises TenantNotFound, AdapterNotFound,
    VersionNotFound."""
    figures = agreement.figures()
    with database.write() as session:
        row = require_version(session, info.tenant_id, info.name, info.version)
        before = row.report.get("agreement")
        row.report = row.report | {"agreement": figures}
        record(
            session,
            by,
            "version.agreement",
            version_target(info.tenant_id, info.name, info.version),
            tenant_id=info.tenant_id,
            before=before,
            after=figures | {"digest": info.digest},
        )
