"""What the admin plane is built from. The factory fills one `AdminServices`; nothing else is global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread

from loraplex.admin.pace import Pace
from loraplex.admin.problem import Problem
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit_log import AuditLog
from loraplex.control.catalog import Catalog
from loraplex.control.database import Database
from loraplex.control.key_cache import KeyCache
from loraplex.control.keys import Keys
from loraplex.control.releases import Releases
from loraplex.control.staged import StagedBytes
from loraplex.control.tenants import Tenants
from loraplex.serving.client import EngineClient
from loraplex.serving.shares import Shares

T = TypeVar("T")


class UploadGate:
    """How much uploading goes on at a time, over both ports: `max_uploads` on their way, shared by the tenants as
    `Shares` does (more get 503), of which `max_validations` are validated (the others wait; validation reads every
    value). What a tenant has on its way at a time is bounded by its quota."""

    def __init__(self, max_uploads: int = 16, max_validations: int = 2) -> None:
        self.max_uploads = max_uploads
        self.uploads = Shares()
        self.staged = StagedBytes()
        self.writers = anyio.CapacityLimiter(max_uploads)
        self.validators = anyio.CapacityLimiter(max_validations)


class DownloadGate:
    """How many downloads of adapters go on at a time, over both ports: `max_downloads`, shared by the tenants as
    `Shares` does (more get 503). `readers` threads read and hash for them."""

    def __init__(self, max_downloads: int = 16, readers: int = 2) -> None:
        self.max_downloads = max_downloads
        self.downloads = Shares()
        self.readers = anyio.CapacityLimiter(readers)


class ReportGate:
    """What reads through a long ledger or log takes seconds: `max_reports` are asked for at a time, shared by the
    tenants as `Shares` does (more get 503), of which `max_running` are made, in threads of their own, so that nothing
    else waits."""

    def __init__(self, max_reports: int = 8, max_running: int = 2) -> None:
        self.max_reports = max_reports
        self.reports = Shares()
        self._threads = anyio.CapacityLimiter(max_running)

    async def run(self, owner: str, read: Callable[[], T]) -> T:
        """`read` in one of the threads, for this owner. Raises Problem."""
        if not self.reports.take(owner, self.max_reports):
            raise Problem(
                "server_overloaded",
                "Too many sums and lists over all that was recorded are being made at the moment; try again.",
                retry_after_s=5,
            )
        try:
            return await anyio.to_thread.run_sync(read, limiter=self._threads)
        finally:
            self.reports.give_back(owner)


@dataclass(frozen=True)
class AdminServices:
    """`max_upload_bytes` bounds an adapter's files together."""

    database: Database
    tenants: Tenants
    keys: Keys
    key_cache: KeyCache
    catalog: Catalog
    releases: Releases
    artifacts: Artifacts
    audit: AuditLog
    engine: EngineClient
    max_upload_bytes: int = 1 << 30
    upload_gate: UploadGate = field(default_factory=UploadGate)
    download_gate: DownloadGate = field(default_factory=DownloadGate)
    report_gate: ReportGate = field(default_factory=ReportGate)
    pace: Pace = field(default_factory=Pace)
