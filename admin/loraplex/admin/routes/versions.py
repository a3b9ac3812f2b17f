"""/tenants/{tenant}/adapters/{name}/versions and below."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated

import anyio
import anyio.to_thread
import structlog
from fastapi import APIRouter, Query, Request, Response

from loraplex.adapters.archive.extract import extract_upload
from loraplex.admin.engine_eviction import evict_removed, unpin_unused
from loraplex.admin.framework.dependencies import (
    AdapterName,
    Audited,
    Reader,
    Services,
    TenantId,
    VersionName,
    Writer,
)
from loraplex.admin.framework.openapi import LOCATION, UPLOAD, Responses, refused
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.problem import Problem
from loraplex.admin.schemas.adapters import Pin, Version, VersionPage, VersionServing
from loraplex.admin.schemas.fields import PageQuery
from loraplex.admin.services import AdminServices, UploadGate
from loraplex.admin.uploads.multipart import Part
from loraplex.admin.uploads.receive import Received, receive_upload
from loraplex.admin.uploads.serving_field import check_serving
from loraplex.control.audit.recorder import Actor
from loraplex.control.catalog.staged import StagedUpload
from loraplex.control.errors import ControlError
from loraplex.control.types import VersionInfo
from loraplex.serving.errors import EngineUnavailable, ServingError

router = APIRouter(prefix="/tenants/{tenant}/adapters/{name}/versions", route_class=AdminRoute)

_PUSHED: Responses = {201: LOCATION, 200: {"model": Version, **LOCATION}, **refused(422)}

log = structlog.get_logger("loraplex.admin")


@router.post(
    "",
    status_code=201,
    responses=_PUSHED,
    openapi_extra=UPLOAD,
)
async def push_version(
    tenant: TenantId,
    name: AdapterName,
    by: Annotated[Writer, Audited("version.upload")],
    services: Services,
    request: Request,
    response: Response,
) -> Version:
    """Upload an adapter as the next version of a name.

    The same bytes again within this name, to be served alike: 200 and the version that has them.
    """
    gate = services.upload_gate
    room = await services.database.run(services.catalog.check_upload, tenant, name)
    with _slot(gate, tenant), gate.staged.upload(tenant, name, room) as staged:
        async with receive_upload(
            request,
            services.artifacts.store,
            max_bytes=services.max_upload_bytes,
            threads=gate.writers,
            staged=staged,
        ) as received:
            admitted = partial(_admit, services, staged, received, by)
            info, is_new = await anyio.to_thread.run_sync(admitted, limiter=gate.validators)
    await _pin_again(services, info.digest)
    # It is asked for soon, if only to try it.
    services.engine.prefetch([info.ref()])
    response.headers["Location"] = f"/admin/v1/tenants/{tenant}/adapters/{name}/versions/{info.version}"
    response.status_code = 201 if is_new else 200
    return _show(info)


@router.get("")
async def list_versions(
    _: Reader, tenant: TenantId, name: AdapterName, query: Annotated[PageQuery, Query()], services: Services
) -> VersionPage:
    """List an adapter's versions, deleted ones too."""
    read = partial(services.catalog.list_versions, limit=query.limit, cursor=query.cursor)
    page = await services.database.run(read, tenant, name)
    return VersionPage(data=[_show(row) for row in page.items], next_cursor=page.next_cursor)


@router.get("/{version}")
async def get_version(
    _: Reader, tenant: TenantId, name: AdapterName, version: VersionName, services: Services
) -> Version:
    """Show a version with its report."""
    return _show(await services.database.run(services.catalog.get_version, tenant, name, version))


@router.delete("/{version}", status_code=204, response_class=Response)
async def delete_version(
    tenant: TenantId,
    name: AdapterName,
    version: VersionName,
    by: Annotated[Writer, Audited("version.delete")],
    services: Services,
) -> None:
    """Delete a version; what runs finishes."""
    delete = partial(services.catalog.delete_version, by=by)
    await evict_removed(services, await services.database.run(delete, tenant, name, version))


@router.put("/{version}/pin")
async def pin_version(
    tenant: TenantId,
    name: AdapterName,
    version: VersionName,
    by: Annotated[Writer, Audited("version.pin")],
    services: Services,
) -> Pin:
    """Keep a version on the device."""
    info = await services.database.run(services.catalog.get_version, tenant, name, version)
    if info.state != "ready":
        raise Problem(
            "conflict", f"{info.name}@{info.version} is {info.state}; only a ready version is pinned."
        )
    # The engine first: a pin that it refuses, for want of memory, must not come back at its next start.
    try:
        await services.engine.pin(info.ref())
    except EngineUnavailable:
        raise
    except ServingError as error:
        raise Problem("conflict", f"The engine does not pin it: {error.message}") from error
    try:
        set_pin = partial(services.catalog.set_pin, pinned=True, by=by)
        return _pinned(await services.database.run(set_pin, tenant, name, version))
    except ControlError:  # deleted in this moment
        await services.engine.unpin(info.digest)
        raise


@router.delete("/{version}/pin")
async def unpin_version(
    tenant: TenantId,
    name: AdapterName,
    version: VersionName,
    by: Annotated[Writer, Audited("version.unpin")],
    services: Services,
) -> Pin:
    """Let a version be evicted from the device when memory is needed."""
    set_pin = partial(services.catalog.set_pin, pinned=False, by=by)
    info = await services.database.run(set_pin, tenant, name, version)
    await unpin_unused(services, info.digest)
    return _pinned(info)


def _admit(
    services: AdminServices, staged: StagedUpload, received: Received, by: Actor
) -> tuple[VersionInfo, bool]:
    """The version that the upload is, and whether it is new. Runs in a worker thread."""
    staging = received.staging
    check_serving(received.serving, services.check_formats)
    if Part.ARCHIVE in received.parts:
        extract_upload(
            staging.archive_path,
            staging.directory,
            max_bytes=services.max_upload_bytes,
            fault=staging.fault,
            reserve=staged.unpack,
        )
    info, is_new = services.catalog.admit(
        staged.tenant_id, staged.name, staging, serving=received.serving, by=by
    )
    staged.admitted(info.bytes if is_new else 0)
    return info, is_new


async def _pin_again(services: AdminServices, digest: str) -> None:
    """Versions that were pinned while their bytes were damaged have them again. The engine drops a pin with the
    damage; to it, one that it has is nothing new."""
    for other in await services.database.run(services.catalog.pinned):
        if other.digest == digest:
            try:
                await services.engine.pin(other.ref())
            except ServingError as error:
                log.warning("pin_failed", adapter=f"{other.name}@{other.version}", reason=error.message)


@contextlib.contextmanager
def _slot(gate: UploadGate, tenant: str) -> Iterator[None]:
    if not gate.uploads.acquire(tenant, gate.max_uploads):
        held = gate.uploads.held(tenant)
        detail = f"Too many uploads are on their way, {held} of them for this tenant; try again."
        raise Problem("server_overloaded", detail, retry_after_s=5)
    try:
        yield
    finally:
        gate.uploads.release(tenant)


def _pinned(info: VersionInfo) -> Pin:
    return Pin(name=info.name, version=info.version, pinned=info.pinned)


def _show(info: VersionInfo) -> Version:
    return Version(
        name=info.name,
        version=info.version,
        digest=info.digest,
        state=info.state,
        rank=info.rank,
        targets=list(info.targets),
        bytes=info.bytes,
        pinned=info.pinned,
        base_fingerprint=info.base_fingerprint,
        created_at=info.created_at,
        serving=VersionServing.model_validate(asdict(info.serving)),
        report=info.report,
    )
