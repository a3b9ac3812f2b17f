"""Versions by their names, and their rows as values."""

from __future__ import annotations

from typing import cast

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.pooled import EmbeddingSpec, Head
from loraplex.control.db.tables import LIVING, Adapter, AdapterVersion
from loraplex.control.errors import AdapterNotFound, VersionNotFound
from loraplex.control.tenancy.tenants import require_tenant, tenant_target
from loraplex.control.types import Checked, Serving, VersionInfo, VersionState, WithoutInvocation


def version_info(row: AdapterVersion) -> VersionInfo:
    return VersionInfo(
        tenant_id=row.tenant_id,
        name=row.name,
        number=row.number,
        digest=row.digest,
        state=cast(VersionState, row.state),
        rank=row.rank,
        targets=tuple(row.targets),
        bytes=row.bytes,
        report=row.report,
        base_fingerprint=row.base_fingerprint,
        pinned=row.pinned,
        created_at=row.created_at,
        serving=Serving(
            row.tool_format,
            row.reasoning_format,
            row.chat_digest,
            cast(WithoutInvocation | None, row.alora),
        ),
        invocation=tuple(row.invocation or ()),
        head=Head.of_json(row.head),
        embedding=EmbeddingSpec.of_json(row.embedding),
        checked=cast(Checked | None, row.checked),
        durable=row.durable,
    )


def state_of(row: AdapterVersion, base_fingerprint: str) -> VersionState:
    """The state of a living version whose bytes are there, while that base is served."""
    if row.base_fingerprint != base_fingerprint:
        return "incompatible"
    return "ready" if row.pending_check is None else "validating"


def version_target(tenant_id: str, name: str, version: str) -> str:
    """Its name in the audit log."""
    return f"{tenant_target(tenant_id)}/adapters/{name}/versions/{version}"


def count_living(session: Session, tenant_id: str, name: str) -> int:
    query = select(func.count()).where(
        AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name, LIVING
    )
    return session.scalar(query) or 0


def version_number(version: str) -> int:
    """The number that a version's name has; -1 for any other text. Each number has one name: "v01" is not v1."""
    digits = version.removeprefix("v")
    if digits == version or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        return -1
    return -1 if digits.startswith("0") else int(digits)


def require_version(session: Session, tenant_id: str, name: str, version: str) -> AdapterVersion:
    """Deleted ones too. Raises TenantNotFound, AdapterNotFound, VersionNotFound."""
    require_tenant(session, tenant_id)
    if session.get(Adapter, (tenant_id, name)) is None:
        raise no_adapter(tenant_id, name)
    row = session.get(AdapterVersion, (tenant_id, name, version_number(version)))
    if row is None:
        raise VersionNotFound(f"'{name}' has no version '{version[:40]}'; versions are named v1, v2, …")
    return row


def require_living(session: Session, tenant_id: str, name: str, version: str) -> AdapterVersion:
    """Raises as `require_version`, and VersionNotFound for one whose bytes are not kept."""
    row = require_version(session, tenant_id, name, version)
    if row.state == "deleted":
        raise VersionNotFound(f"{name}@{version} is deleted.")
    if row.state == "rejected":
        raise VersionNotFound(f"{name}@{version} was rejected, and its bytes were not kept.")
    if row.state == "retired":
        raise VersionNotFound(retired(name, version))
    if row.state == "lost":
        raise VersionNotFound(lost(name, version))
    return row


def retired(name: str, version: str) -> str:
    """The sentence about a version that its series does not keep any more."""
    return (
        f"{name}@{version} is retired: the series '{name}' keeps its newest versions and those in use, and this one is "
        "neither. Ask for a newer version."
    )


def lost(name: str, version: str) -> str:
    """The sentence about a version whose bytes a crash has cost."""
    return (
        f"{name}@{version} is lost: the machine stopped before its bytes were durable on the disk. Push them again, or "
        "ask for another version."
    )


def no_adapter(tenant_id: str, name: str) -> AdapterNotFound:
    return AdapterNotFound(f"The tenant '{tenant_id}' has no adapter '{name[:80]}'.")
