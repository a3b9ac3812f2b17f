"""/tenants/{tenant}/adapters/{name}/versions and below."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from loraplex.admin.admission import Receive, admit_version
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
from loraplex.admin.framework.strict_request import read_json
from loraplex.admin.problem import Problem
from loraplex.admin.schemas.adapters import (
    Pin,
    PushQuery,
    Version,
    VersionImport,
    VersionPage,
)
from loraplex.admin.schemas.fields import PageQuery
from loraplex.admin.uploads.imports import import_source
from loraplex.admin.uploads.receive import receive_upload
from loraplex.admin.uploads.serving_field import without_invocation
from loraplex.control.errors import ControlError
from loraplex.control.types import Serving
from loraplex.lifecycle.eviction import evict_removed, unpin_unused
from loraplex.serving.errors import EngineUnavailable, ServingError

router = APIRouter(prefix="/tenants/{tenant}/adapters/{name}/versions", route_class=AdminRoute)

_PUSHED: Responses = {
    201: LOCATION,
    200: {"model": Version, **LOCATION},
    202: {"model": Version, "description": "It is being checked", **LOCATION},
    **refused(422, 503),
}


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
    query: Annotated[PushQuery, Query()],
) -> Version:
    """Upload an adapter as the next version of a name, or import it.

    A JSON body with `source` imports from a place that the operator allowed (--adapter-sources). The same bytes again
    within this name, to be served alike: 200 and the version that has them. The answer waits until the version's
    numbers are checked; with wait=false it is 202 and the version `validating`. With tags the adapter gets these beside
    those that it has.
    """
    store, max_bytes = services.artifacts.store, services.max_upload_bytes
    receive: Receive = partial(receive_upload, request, store, max_bytes=max_bytes)
    url = None
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        asked: VersionImport = await read_json(request, VersionImport, optional=False)
        source = services.sources.allow(asked.source, tenant)
        choice = asked.serving
        serving = Serving(choice.tool_format, choice.reasoning_format, alora=without_invocation(choice.alora))
        receive, url = partial(import_source, source, store, max_bytes=max_bytes, serving=serving), source.url
    info, is_new = await admit_version(
        services, tenant, name, receive, by=by, source=url, wait=query.wait, tags=query.tag_list
    )
    response.headers["Location"] = f"/admin/v1/tenants/{tenant}/adapters/{name}/versions/{info.version}"
    response.status_code = 202 if info.state == "validating" else 201 if is_new else 200
    return Version.of(info)


@router.get("")
async def list_versions(
    _: Reader, tenant: TenantId, name: AdapterName, query: Annotated[PageQuery, Query()], services: Services
) -> VersionPage:
    """List an adapter's versions, deleted and rejected ones too."""
    read = partial(services.catalog.list_versions, limit=query.limit, cursor=query.cursor)
    page = await services.database.run(read, tenant, name)
    return VersionPage(data=[Version.of(row) for row in page.items], next_cursor=page.next_cursor)


@router.get("/{version}")
async def get_version(
    _: Reader, tenant: TenantId, name: AdapterName, version: VersionName, services: Services
) -> Version:
    """Show a version with its report."""
    return Version.of(await services.database.run(services.catalog.get_version, tenant, name, version))


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
        return Pin.of(await services.database.run(set_pin, tenant, name, version))
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
    return Pin.of(info)
