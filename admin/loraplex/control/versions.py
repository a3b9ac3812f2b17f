"""Rows of versions as values."""

from __future__ import annotations

from typing import cast

from loraplex.control.tables import AdapterVersion
from loraplex.control.types import VersionInfo, VersionState


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
    )
