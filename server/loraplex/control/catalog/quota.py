"""How many adapters a tenant may have, how many bytes of them and of files, and how many comparisons that wait."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from loraplex.adapters.errors import AdapterRefused
from loraplex.control.catalog.staged import UploadRoom
from loraplex.control.db.tables import LIVING, AdapterVersion
from loraplex.control.errors import RateLimited
from loraplex.control.tenancy.stored import stored_bytes
from loraplex.control.types import Limits

MAX_COMPARISONS = 64
"""Versions of one tenant that wait for the comparison with their trainer. The numbers of each are some 270 KB in the
database."""
COMPARED_AGAIN_S = 10.0
"""After which a push that was refused for it is worth another try."""


def check_quota(session: Session, limits: Limits, tenant_id: str, name: str, num_bytes: int) -> None:
    """Whether the tenant may have a version of `name` with `num_bytes` more. Raises AdapterRefused."""
    living = (AdapterVersion.tenant_id == tenant_id, LIVING)
    if limits.max_adapters is not None:
        others = session.scalar(
            select(func.count(AdapterVersion.name.distinct())).where(*living, AdapterVersion.name != name)
        )
        if (others or 0) >= limits.max_adapters:
            raise AdapterRefused(
                "quota_exceeded",
                f"The tenant may have {limits.max_adapters} adapters and has them; delete one first.",
            )
    check_bytes(session, limits, tenant_id, num_bytes)


def check_bytes(session: Session, limits: Limits, tenant_id: str, num_bytes: int) -> None:
    """Whether the tenant may keep `num_bytes` more of versions and files. Raises AdapterRefused."""
    if limits.max_adapter_bytes is not None:
        used = stored_bytes(session, [tenant_id]).get(tenant_id, 0)
        if used + num_bytes > limits.max_adapter_bytes:
            raise AdapterRefused(
                "quota_exceeded",
                f"The tenant may keep {limits.max_adapter_bytes} bytes of adapters and files; {used} are in use and "
                f"this upload has {num_bytes}. Delete versions or files first.",
            )


def check_comparisons(session: Session, tenant_id: str) -> None:
    """Whether the tenant may have one more version that waits for the comparison with its trainer. Raises
    RateLimited."""
    waiting = select(func.count()).where(
        AdapterVersion.tenant_id == tenant_id, LIVING, AdapterVersion.pending_agreement.is_not(None)
    )
    if (session.scalar(waiting) or 0) >= MAX_COMPARISONS:
        raise RateLimited(
            f"{MAX_COMPARISONS} versions of the tenant wait for the comparison with their trainer, and no more may: "
            "push again when some are decided, or delete those that are not wanted.",
            retry_after_s=COMPARED_AGAIN_S,
        )


def upload_room(session: Session, limits: Limits, tenant_id: str, name: str) -> UploadRoom | None:
    """The bytes that an upload to `name` may stage now; None without a limit."""
    if limits.max_adapter_bytes is None:
        return None
    same = (AdapterVersion.tenant_id == tenant_id, AdapterVersion.name == name, LIVING)
    known = session.scalar(select(func.max(AdapterVersion.bytes)).where(*same)) or 0
    used = stored_bytes(session, [tenant_id]).get(tenant_id, 0)
    left = max(0, limits.max_adapter_bytes - used)
    return UploadRoom(limits.max_adapter_bytes, left, known)
