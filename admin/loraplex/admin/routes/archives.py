"""/tenants/{tenant}/adapters/{name}/versions/{version}/archive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

import anyio.to_thread
import structlog
from fastapi import APIRouter, Request, Response

from loraplex.adapters.archive.stored_archive import MEDIA_TYPE, StoredArchive
from loraplex.adapters.errors import ArtifactCorrupt, ArtifactMissing, LoraplexError
from loraplex.admin.download import Download
from loraplex.admin.framework.dependencies import AdapterName, Reader, Services, TenantId, VersionName
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.problem import Problem
from loraplex.admin.services import AdminServices, DownloadGate
from loraplex.control.errors import AdapterUnavailable
from loraplex.control.types import VersionInfo
from loraplex.serving.errors import ServingError

router = APIRouter(route_class=AdminRoute)

log = structlog.get_logger("loraplex.admin")

_STRING = {"required": True, "schema": {"type": "string"}}


class _Tar(Response):
    media_type = MEDIA_TYPE


@router.get(
    "/tenants/{tenant}/adapters/{name}/versions/{version}/archive",
    response_class=_Tar,
    responses={
        200: {
            "description": "The file",
            "headers": {"Content-Length": _STRING, "Content-Disposition": _STRING},
            "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def get_archive(
    _: Reader, tenant: TenantId, name: AdapterName, version: VersionName, services: Services, request: Request
) -> Response:
    """Download a version's two files as they were uploaded, as a tar.

    A version that brings a chat template or ends of answers has them beside the two.
    """
    info = await services.database.run(services.catalog.get_living, tenant, name, version)
    chat = await services.database.run(services.catalog.get_chat, tenant, name, version)
    others = {} if chat is None else chat.files()
    if info.state == "corrupt":
        raise _damaged(info)
    give_back = _slot(services.download_gate, tenant)
    try:
        archive, first = await _opened(services, info, others)
    except BaseException:
        give_back()
        raise
    headers = {
        "Content-Disposition": f'attachment; filename="{info.name}-{info.version}.tar"',
        "Cache-Control": "no-store",
    }

    def close() -> None:
        archive.close()
        give_back()

    if request.method == "HEAD":
        close()
        return Response(None, 200, {**headers, "Content-Length": str(archive.num_bytes)}, MEDIA_TYPE)

    async def cut(error: LoraplexError) -> None:
        log.error("download_cut", adapter=f"{info.name}@{info.version}", reason=error.message)
        await _report(services, error, info.digest)

    return Download(
        first,
        partial(anyio.to_thread.run_sync, archive.read, limiter=services.download_gate.readers),
        num_bytes=archive.num_bytes,
        headers=headers,
        media_type=MEDIA_TYPE,
        on_failure=cut,
        close=close,
    )


def _slot(gate: DownloadGate, tenant: str) -> Callable[[], None]:
    """Takes one of the tenant's downloads; returns what gives it back. Raises Problem (503)."""
    if not gate.downloads.acquire(tenant, gate.max_downloads):
        held = gate.downloads.held(tenant)
        detail = f"Too many downloads are on their way, {held} of them for this tenant; try again."
        raise Problem("server_overloaded", detail, retry_after_s=5)
    return partial(gate.downloads.release, tenant)


async def _opened(
    services: AdminServices, info: VersionInfo, others: Mapping[str, bytes]
) -> tuple[StoredArchive, bytes]:
    """The archive and its first bytes. Raises AdapterUnavailable, VersionNotFound: what is damaged at its beginning
    is still an answer that says so."""

    def open_and_read() -> tuple[StoredArchive, bytes]:
        archive = StoredArchive(services.artifacts.store.path(info.digest), info.digest, others=others)
        try:
            return archive, archive.read()
        except BaseException:
            archive.close()
            raise

    try:
        return await anyio.to_thread.run_sync(open_and_read, limiter=services.download_gate.readers)
    except (ArtifactMissing, ArtifactCorrupt) as error:
        await _report(services, error, info.digest)
        # Or it was deleted just now.
        await services.database.run(services.catalog.get_living, info.tenant_id, info.name, info.version)
        raise _damaged(info) from error


async def _report(services: AdminServices, error: LoraplexError, digest: str) -> None:
    """The catalog looks for itself: a deletion takes the bytes away too."""
    if isinstance(error, ArtifactMissing | ArtifactCorrupt):
        try:
            damaged = await services.database.run(services.catalog.mark_damaged, digest)
        except LoraplexError as failure:
            log.warning("damage_not_recorded", digest=digest, reason=failure.message)
            return
        if damaged:
            # Nothing asks for it any more; a pin would have it read over and over.
            with contextlib.suppress(ServingError):
                await services.engine.drop(digest)


def _damaged(info: VersionInfo) -> AdapterUnavailable:
    return AdapterUnavailable(
        f"The stored bytes of {info.name}@{info.version} are damaged or lost; upload the same files again to mend them."
    )
