"""The adapters of tenants, and the bytes of their versions and files, as their quotas count them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from loraplex.control.db.batch_tables import StoredFile
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.types import Limits, Stored


def stored_of(session: Session, limits: Mapping[str, Limits]) -> dict[str, Stored]:
    """The adapters and bytes of these tenants, as far as a limit bounds them."""
    counted = {tenant_id for tenant_id, own in limits.items() if own.max_adapters is not None}
    weighed = {tenant_id for tenant_id, own in limits.items() if own.max_adapter_bytes is not None}
    names = func.count(AdapterVersion.name.distinct())
    adapters = _by_tenant(session, AdapterVersion.tenant_id, names, counted, LIVING)
    sizes = stored_bytes(session, weighed)
    return {
        tenant_id: Stored(
            adapters.get(tenant_id, 0) if tenant_id in counted else None,
            sizes.get(tenant_id, 0) if tenant_id in weighed else None,
        )
        for tenant_id in limits
    }


def stored_bytes(session: Session, tenant_ids: Collection[str]) -> dict[str, int]:
    """Bytes of the living versions and of the files of those of these tenants that have any."""
    version, file = AdapterVersion, StoredFile
    versions = _by_tenant(session, version.tenant_id, func.sum(version.bytes), tenant_ids, LIVING)
    files = _by_tenant(session, file.tenant_id, func.sum(file.bytes), tenant_ids)
    return {owner: versions.get(owner, 0) + files.get(owner, 0) for owner in versions.keys() | files.keys()}


def _by_tenant(
    session: Session, owner: Any, value: Any, tenant_ids: Collection[str], *where: ColumnElement[bool]
) -> dict[str, int]:
    if not tenant_ids:
        return {}
    query = select(owner, value).where(owner.in_(sorted(tenant_ids)), *where).group_by(owner)
    return {tenant_id: int(found) for tenant_id, found in session.execute(query)}  # a Decimal on PostgreSQL
