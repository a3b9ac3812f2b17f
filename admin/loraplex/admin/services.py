"""The services that admin routes use. The factory fills one `AdminServices`; nothing else is global."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio

from loraplex.adapters.admission.chat_files import ChatFiles
from loraplex.adapters.sources.urls import AllowedSources
from loraplex.admin.change_rate_limit import ChangeRateLimit
from loraplex.admin.problem import Problem
from loraplex.admin.uploads.serving_field import CheckFormats
from loraplex.control.artifacts import Artifacts
from loraplex.control.audit.log import AuditLog
from loraplex.control.catalog.adapters import Catalog
from loraplex.control.catalog.releases import Releases
from loraplex.control.catalog.series import AllSeries
from loraplex.control.catalog.staged import StagedBytes
from loraplex.control.db.database import Database
from loraplex.control.history.history import History
from loraplex.control.recent_requests import RecentRequests
from loraplex.control.tenancy.key_cache import KeyCache
from loraplex.control.tenancy.keys import Keys
from loraplex.control.tenancy.tenants import Tenants
from loraplex.control.types import Principal, Serving, VersionInfo
from loraplex.control.usage.overview import Overviews
from loraplex.lifecycle.agreement_checks import Score
from loraplex.lifecycle.durability import Durability, PushOutcome
from loraplex.lifecycle.eviction import SurplusRemoval
from loraplex.lifecycle.needs.disks import Folder, RoomReader
from loraplex.lifecycle.version_checks import VersionChecks
from loraplex.serving.engines.engines import Engines
from loraplex.serving.fair_share import FairShare
from loraplex.serving.tenant_threads import TenantThreads
from loraplex.serving.text.own_chat import ChatFound

T = TypeVar("T")

ExamineChat = Callable[[str, ChatFiles, Serving], Awaitable[ChatFound]]
"""Compares what a tenant's upload brings for its chats with the base's. Raises AdapterRefused, ServingError."""


async def _nothing_differs(tenant_id: str, files: ChatFiles, serving: Serving) -> ChatFound:
    return ChatFound()


async def _not_served(
    principal: Principal, info: VersionInfo, prompts: Sequence[Sequence[int]]
) -> list[list[float]]:
    raise Problem("engine_restarting", "This server computes no requests; try again.", retry_after_s=1)


class UploadGate:
    """Limits concurrent uploads over both ports: `max_uploads` in transfer, shared by the tenants as `FairShare` does
    (more get 503). `max_validations` of them are unpacked and validated at a time, shared as `TenantThreads` does; the
    others wait, since validation reads every value. The bytes that a tenant may have in transfer are bounded by its
    quota."""

    def __init__(self, max_uploads: int = 16, max_validations: int = 2) -> None:
        self.max_uploads = max_uploads
        self.uploads = FairShare()
        self.staged = StagedBytes()
        self.writers = anyio.CapacityLimiter(max_uploads)
        self.validators = TenantThreads(max_validations)


class DownloadGate:
    """Limits concurrent downloads of adapters over both ports to `max_downloads`, shared by the tenants as `FairShare`
    does (more get 503). `readers` threads read and hash for them."""

    def __init__(self, max_downloads: int = 16, readers: int = 2) -> None:
        self.max_downloads = max_downloads
        self.downloads = FairShare()
        self.readers = anyio.CapacityLimiter(readers)


class ReportGate:
    """Limits reports that read a long ledger or log, which takes seconds: `max_reports` wait or run at a time, shared
    by the tenants as `FairShare` does (more get 503). `max_running` of them run at a time, shared as `TenantThreads`
    does, so that nothing else waits."""

    def __init__(self, max_reports: int = 8, max_running: int = 2) -> None:
        self.max_reports = max_reports
        self.reports = FairShare()
        self._threads = TenantThreads(max_running)

    async def run(self, owner: str, read: Callable[[], T]) -> T:
        """Run `read` in one of the threads, for this owner. Raises Problem."""
        if not self.reports.acquire(owner, self.max_reports):
            raise Problem(
                "server_overloaded",
                "Too many usage and audit reports are running; try again.",
                retry_after_s=5,
            )
        try:
            return await self._threads.run(owner, read)
        finally:
            self.reports.release(owner)


@dataclass(frozen=True)
class AdminServices:
    """`max_upload_bytes` bounds an adapter's files together. `data_url` is the URL of the data plane for browsers,
    without a slash at its end; None where the operator did not say."""

    database: Database
    tenants: Tenants
    keys: Keys
    key_cache: KeyCache
    catalog: Catalog
    releases: Releases
    series: AllSeries
    artifacts: Artifacts
    audit: AuditLog
    engine: Engines
    checks: VersionChecks
    overviews: Overviews
    recent: RecentRequests = field(default_factory=RecentRequests)
    sources: AllowedSources = field(default_factory=AllowedSources)
    surplus: SurplusRemoval | None = None
    durability: Durability | None = None
    """None: every upload is flushed before its answer."""
    max_upload_bytes: int = 1 << 30
    data_url: str | None = None
    folders: Sequence[Folder] = ()
    """The folders that this server writes to."""
    rooms: RoomReader = field(default_factory=RoomReader)
    upload_gate: UploadGate = field(default_factory=UploadGate)
    download_gate: DownloadGate = field(default_factory=DownloadGate)
    report_gate: ReportGate = field(default_factory=ReportGate)
    history: History = field(default_factory=History)
    change_limit: ChangeRateLimit = field(default_factory=ChangeRateLimit)
    on_change: Callable[[str], None] = lambda action: None
    """Called with the audit log's name of each change that was made."""
    on_push: Callable[[PushOutcome], None] = lambda outcome: None
    """Called with the outcome of each push to a series that was taken."""
    on_agreement: Callable[[float], None] = lambda mean: None
    """Called with the mean absolute difference of each comparison with a trainer, in nats."""
    examine_chat: ExamineChat = _nothing_differs
    score: Score = _not_served
    check_formats: CheckFormats = lambda tool_format, reasoning_format: None
