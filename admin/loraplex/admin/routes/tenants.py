"""/tenants."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response

from loraplex.admin.framework.dependencies import Audited, Operator, Services, TenantId, UsageReader
from loraplex.admin.framework.openapi import LOCATION
from loraplex.admin.framework.route import AdminRoute
from loraplex.admin.schemas.fields import PageQuery
from loraplex.admin.schemas.tenants import (
    Erased,
    Erasure,
    Kept,
    Tenant,
    TenantChange,
    TenantCreate,
    TenantDeleted,
    TenantPage,
)
from loraplex.admin.services import AdminServices
from loraplex.control.types import TenantRemoval
from loraplex.lifecycle.eviction import evict_removed
from loraplex.serving.errors import EngineUnavailable

router = APIRouter(route_class=AdminRoute)
tenant_router = APIRouter(route_class=AdminRoute)


@router.post("/tenants", status_code=201, responses={201: LOCATION})
async def create_tenant(
    body: TenantCreate,
    by: Annotated[Operator, Audited("tenant.create")],
    services: Services,
    response: Response,
) -> Tenant:
    """Create a tenant."""
    create = partial(
        services.tenants.create,
        display_name=body.display_name,
        weight=body.weight,
        limits=body.limits.model_dump(exclude_unset=True),
        reservable=_reservable(services),
        by=by,
    )
    made = await services.database.run(create, body.id)
    response.headers["Location"] = f"/admin/v1/tenants/{made.id}"
    return Tenant.of(made)


@router.get("/tenants")
async def list_tenants(_: Operator, query: Annotated[PageQuery, Query()], services: Services) -> TenantPage:
    """List tenants by id."""
    read = partial(services.tenants.list, limit=query.limit, cursor=query.cursor)
    page = await services.database.run(read)
    return TenantPage(data=[Tenant.of(row) for row in page.items], next_cursor=page.next_cursor)


@tenant_router.get("/tenants/{tenant}")
async def get_tenant(_: UsageReader, tenant: TenantId, services: Services) -> Tenant:
    """Show a tenant."""
    return Tenant.of(await services.database.run(services.tenants.get, tenant))


@router.patch("/tenants/{tenant}")
async def update_tenant(
    tenant: TenantId,
    body: TenantChange,
    by: Annotated[Operator, Audited("tenant.update")],
    services: Services,
) -> Tenant:
    """Change a tenant."""
    changes, reservable = body.model_dump(exclude_unset=True), _reservable(services)
    update = partial(services.tenants.update, changes=changes, reservable=reservable, by=by)
    return Tenant.of(await services.database.run(update, tenant))


@router.get("/tenants/{tenant}/erasure")
async def get_erasure(_: Operator, tenant: TenantId, services: Services) -> Erasure:
    """Show what the deletion of a tenant would erase now, and what would stay."""
    return _erasure(await services.database.run(services.tenants.would_delete, tenant))


@router.delete("/tenants/{tenant}")
async def delete_tenant(
    tenant: TenantId, by: Annotated[Operator, Audited("tenant.delete")], services: Services
) -> TenantDeleted:
    """Delete a tenant with its keys, adapters, files, batches and texts; requests that run finish.

    The answer says what is erased and what is kept.
    """
    removal = await services.database.run(partial(services.tenants.delete, by=by), tenant)
    services.recent.forget(tenant)
    await evict_removed(services, removal)
    with contextlib.suppress(EngineUnavailable):  # what is away comes back without its prefixes
        await services.engine.forget_tenant(tenant)
    return TenantDeleted(id=removal.tenant_id, deleted=True, **dict(_erasure(removal)))


def _reservable(services: AdminServices) -> int | None:
    """Bytes of this server's engine; None while there was none yet."""
    try:
        info = services.engine.info
    except EngineUnavailable:
        return None
    return info.arena_pages // 2 * info.arena_page_bytes


def _erasure(removal: TenantRemoval) -> Erasure:
    return Erasure(
        erased=Erased(
            keys=removal.num_keys,
            adapters=removal.num_adapters,
            versions=removal.num_versions,
            series=removal.num_series,
            artifacts=len(removal.digests),
            artifact_bytes=removal.num_bytes,
            files=removal.num_files,
            file_bytes=removal.num_file_bytes,
            batches=removal.num_batches,
            audit_texts=removal.num_texts,
        ),
        kept=Kept(
            usage_since=removal.usage_since,
            audit_rows=removal.num_audit_rows,
            shared_artifacts=removal.num_shared_artifacts,
        ),
    )
